"""What a program printed, bounded while it runs and made readable at the end.

The invariant: memory stays within a small multiple of the limit however much is printed, and both the first and the
last bytes survive.
"""

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement, bracketed paste
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: window titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def clean(raw: bytes) -> str:
    r"""Readable text of terminal bytes: UTF-8, no control sequences, LF line ends, `\r` overwriting as on a screen."""
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    if "\x08" in text:
        text = "\n".join(map(_backspaced, text.split("\n")))
    return _CONTROLS.sub("", text)


def _backspaced(line: str) -> str:
    shown: list[str] = []
    for character in line:
        if character != "\x08":
            shown.append(character)
        elif shown:
            shown.pop()
    return "".join(shown)


def fit(text: str, limit_bytes: int) -> str:
    """Text cut to about `limit_bytes` of UTF-8: head, a note of what was left out, tail."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit_bytes:
        return text
    half = limit_bytes // 2
    head, tail = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{head}\n[... {len(raw) - 2 * half} bytes left out ...]\n{tail}"


class BoundedOutput:
    """Keeps the first and the last bytes of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(1, limit_bytes // 2)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._head)

    def append(self, chunk: bytes) -> None:
        """Add bytes; what is between head and tail is counted and dropped."""
        room = self._half - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk
            if len(self._tail) > 4 * self._half:  # cut seldom: each cut copies the tail
                self._trim()

    def _trim(self) -> None:
        over = len(self._tail) - self._half
        if over > 0:
            self._dropped += over
            del self._tail[:over]

    def text(self) -> str:
        """Readable text of what was kept, with a note where something is missing."""
        self._trim()
        limit = 2 * self._half
        if not self._dropped:
            return fit(clean(bytes(self._head + self._tail)), limit)
        head, tail = clean(bytes(self._head)), clean(bytes(self._tail))
        note = f"\n[... {self._dropped} bytes left out ...]\n"
        return fit(head, self._half) + note + fit(tail, self._half)
