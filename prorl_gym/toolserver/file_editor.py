r"""View and edit text files.

The invariant: bytes outside the edit stay as they are (encoding, line ends, final newline), and so do mode, owner and
links. A file that is not text is refused, never guessed at.
"""

import codecs
import hashlib
import os
import stat
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .output import fit
from .session import Reply

_MAX_FILE_BYTES = 10 << 20
_CONTEXT_LINES = 4
_NUMBER_BYTES = 9
"""A line of a view beyond the file's own: number, tab and line end."""
_MAX_ENTRIES = 400
_UNDO_BYTES = 64 << 20


class Refused(Exception):
    """The command does not apply; the message is for the model."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text file as read: `text` holds its own line ends."""

    path: Path
    text: str
    encoding: str
    bom: bytes

    @property
    def eol(self) -> str:
        crlf = self.text.count("\r\n")
        return "\r\n" if crlf and crlf * 2 > self.text.count("\n") else "\n"

    def encode(self, text: str) -> bytes:
        return self.bom + text.encode(self.encoding)


@dataclass(frozen=True, slots=True, eq=False)
class _Edit:
    """One edit that can be undone: the file's bytes before it (None: there was no file) and a digest of those after."""

    real: Path
    before: bytes | None
    digest: bytes


class FileEditor:
    """The tool; one instance holds the history that `undo_edit` needs."""

    def __init__(self, workdir: str, output_bytes: int) -> None:
        self._workdir = Path(workdir)
        self._limit = output_bytes
        self._history: deque[_Edit] = deque()

    def run(self, arguments: dict[str, Any]) -> Reply:
        """Execute one command; a refusal is a reply like any other."""
        commands = {
            "view": self._view, "create": self._create, "str_replace": self._replace, "insert": self._insert,
            "undo_edit": self._undo,
        }  # fmt: skip
        try:
            path = self._workdir / arguments["path"]
            return Reply(fit(commands[arguments["command"]](path, arguments), self._limit))
        except Refused as error:
            return Reply(f"Error: {error}", error=True)
        except UnicodeEncodeError as error:
            return Reply(f"Error: the new text does not fit the file's encoding: {error}", error=True)
        except OSError as error:
            return Reply(f"Error: {arguments['path']}: {error.strerror or error}", error=True)
        except ValueError as error:
            return Reply(f"Error: {arguments['path']!a} is no path: {error}", error=True)

    def _view(self, path: Path, arguments: dict[str, Any]) -> str:
        if path.is_dir():
            if arguments.get("view_range"):
                raise Refused(f"{path} is a directory: view_range does not apply")
            return _listing(path)
        lines = _split(_read(path).text)
        first, last = 1, len(lines)
        if arguments.get("view_range"):
            first, last = arguments["view_range"]
            last = len(lines) if last == -1 else last
            if not 1 <= first <= max(1, len(lines)) or last < first:
                raise Refused(f"view_range {arguments['view_range']} does not fit: {path} has {len(lines)} lines")
            last = min(last, len(lines))
        if not lines:
            return f"{path} is empty"
        head_last = first + _how_many(lines[first - 1 : last], self._limit // 2)
        tail_first = last - _how_many(reversed(lines[first - 1 : last]), self._limit // 2)
        if head_last >= tail_first - 1:
            return _numbered(lines, first, last)
        head, tail = _numbered(lines, first, head_last), _numbered(lines, tail_first, last)
        return f"{head}\n[... {tail_first - head_last - 1} lines left out ...]\n{tail}"

    def _create(self, path: Path, arguments: dict[str, Any]) -> str:
        if path.exists() or path.is_symlink():
            raise Refused(f"{path} exists already: edit it with str_replace or insert")
        raw = arguments["file_text"].encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(raw)
        self._remember(path.resolve(), None, raw)
        return f"Created {path} ({len(raw)} bytes)"

    def _replace(self, path: Path, arguments: dict[str, Any]) -> str:
        old, new = arguments["old_str"], arguments.get("new_str") or ""
        if not old:
            raise Refused("old_str is empty: use insert to add text")
        if old == new:
            raise Refused("old_str and new_str are the same: nothing to change")
        file = _read(path)
        if old not in file.text and "\r\n" in file.text:  # the model sees and writes LF only
            old, new = (text.replace("\r\n", "\n").replace("\n", "\r\n") for text in (old, new))
        count = _occurrences(file.text, old)
        if count != 1:
            raise Refused(_mismatch(file.text, old, path, count))
        at = file.text.index(old)
        changed = file.text[:at] + new + file.text[at + len(old) :]
        self._write(file, changed)
        first = file.text.count("\n", 0, at) + 1
        return _snippet(path, changed, first, first + new.count("\n"))

    def _insert(self, path: Path, arguments: dict[str, Any]) -> str:
        file = _read(path)
        lines = _split_keeping(file.text)
        line = arguments["insert_line"]
        if not 0 <= line <= len(lines):
            raise Refused(f"insert_line {line} does not fit: {path} has {len(lines)} lines (0 inserts at the start)")
        new = arguments["new_str"].replace("\r\n", "\n").replace("\n", file.eol)
        if line == len(lines) and lines and not lines[-1].endswith("\n"):
            new = file.eol + new  # the file ends without a newline, and goes on doing so
        elif not new.endswith("\n"):
            new += file.eol
        changed = "".join(lines[:line]) + new + "".join(lines[line:])
        self._write(file, changed)
        return _snippet(path, changed, line + 1, line + max(1, arguments["new_str"].rstrip("\n").count("\n") + 1))

    def _undo(self, path: Path, arguments: dict[str, Any]) -> str:
        real = path.resolve()
        edit = next((edit for edit in reversed(self._history) if edit.real == real), None)
        if edit is None:
            raise Refused(f"there is no edit of {path} to undo")
        if not real.is_file() or hashlib.sha256(real.read_bytes()).digest() != edit.digest:
            raise Refused(f"{path} was changed by something else since the edit: not undone")
        self._history.remove(edit)
        if edit.before is None:
            real.unlink()
            return f"Undone: {path} is gone again"
        _overwrite(real, edit.before)
        return f"Undone: {path} is as it was before the last edit"

    def _write(self, file: _Text, changed: str) -> None:
        before, after = file.encode(file.text), file.encode(changed)
        real = file.path.resolve()
        _overwrite(real, after, restore=before)
        self._remember(real, before, after)

    def _remember(self, real: Path, before: bytes | None, after: bytes) -> None:
        self._history.append(_Edit(real, before, hashlib.sha256(after).digest()))
        while len(self._history) > 1 and sum(len(edit.before or b"") for edit in self._history) > _UNDO_BYTES:
            self._history.popleft()


def _read(path: Path) -> _Text:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise Refused(f"{path} is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path} is not a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise Refused(f"{path} has {status.st_size} bytes, more than this tool reads ({_MAX_FILE_BYTES}): use bash")
        raw = _read_bounded(descriptor, path)
    finally:
        os.close(descriptor)
    for bom, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if raw.startswith(bom):
            try:
                return _Text(path, raw[len(bom) :].decode(encoding), encoding, bom)
            except UnicodeDecodeError:
                raise Refused(f"{path} is binary: use bash") from None
    if b"\0" in raw:
        raise Refused(f"{path} is binary: use bash")
    try:
        return _Text(path, raw.decode("utf-8"), "utf-8", b"")
    except UnicodeDecodeError:
        return _Text(path, raw.decode("latin-1"), "latin-1", b"")


def _read_bounded(descriptor: int, path: Path) -> bytes:
    """All of a file; some below /proc say that they are empty and never end."""
    parts, size = [], 0
    while chunk := os.read(descriptor, 1 << 20):
        parts.append(chunk)
        size += len(chunk)
        if size > _MAX_FILE_BYTES:
            raise Refused(f"{path} has more than {_MAX_FILE_BYTES} bytes: use bash")
    return b"".join(parts)


def _overwrite(real: Path, content: bytes, restore: bytes | None = None) -> None:
    """Same inode, so mode, owner and hard links stay; a write that fails (disk full) is taken back."""
    with real.open("r+b", buffering=0) as file:
        try:
            _put(file.fileno(), content)
        except OSError:
            if restore is not None:
                _put(file.fileno(), restore)
            raise


def _put(descriptor: int, content: bytes) -> None:
    view, offset = memoryview(content), 0
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    os.ftruncate(descriptor, len(content))


def _split_keeping(text: str) -> list[str]:
    """Lines with their ends; only LF ends a line, as for `cat -n`."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def _split(text: str) -> list[str]:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def _numbered(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))


def _how_many(lines: Iterable[str], room_bytes: int) -> int:
    """How many more lines than the first one fit."""
    count = -1
    for line in lines:
        room_bytes -= len(line.encode("utf-8", "replace")) + _NUMBER_BYTES
        if room_bytes < 0:
            break
        count += 1
    return max(0, count)


def _snippet(path: Path, text: str, first: int, last: int) -> str:
    lines = _split(text)
    if not lines:
        return f"Edited {path}; it is empty now"
    first, last = max(1, first - _CONTEXT_LINES), min(len(lines), last + _CONTEXT_LINES)
    return f"Edited {path}; it now reads:\n{_numbered(lines, min(first, last), last)}"


def _occurrences(text: str, part: str) -> int:
    """Places where `part` starts, overlapping ones too: each would be another edit."""
    count, at = 0, text.find(part)
    while at >= 0 and count < 100:
        count += 1
        at = text.find(part, at + 1)
    return count


def _mismatch(text: str, old: str, path: Path, count: int) -> str:
    if count:
        places: list[str] = []
        at = text.find(old)
        while at >= 0 and len(places) < 10:
            places.append(str(text.count("\n", 0, at) + 1))
            at = text.find(old, at + 1)
        where = ", ".join(places)
        return f"old_str occurs {count} times in {path}, at lines {where}: add lines around it to make it unique"
    wanted = [line.strip() for line in old.splitlines() if line.strip()]
    near = [n for n, line in enumerate(_split(text), 1) if wanted and line.strip() == wanted[0]]
    hint = f"; its first line stands, with other white space, at line {near[0]}" if near else ""
    return f"old_str was not found in {path}: it must match exactly, white space included{hint}"


def _listing(path: Path) -> str:
    """Two levels of names, hidden ones left out."""
    rows: list[str] = []

    def walk(folder: Path, depth: int) -> None:
        with os.scandir(folder) as entries:
            ordered = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        for entry in ordered:
            if len(rows) >= _MAX_ENTRIES:
                return
            folder_inside = entry.is_dir(follow_symlinks=False)
            rows.append("  " * (depth - 1) + entry.name + ("/" if folder_inside else ""))
            if folder_inside and depth < 2 and os.access(entry.path, os.R_OK | os.X_OK):
                walk(Path(entry.path), depth + 1)

    walk(path, 1)
    more = [f"[only the first {_MAX_ENTRIES} entries are shown]"] if len(rows) >= _MAX_ENTRIES else []
    return "\n".join([f"{path}/", *(f"  {row}" for row in rows), *more])
