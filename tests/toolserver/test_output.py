import time

import pytest

from prorl_gym.toolserver.frames import MAX_BODY_BYTES, FrameBuffer, FrameError, pack
from prorl_gym.toolserver.output import BoundedOutput, clean, fit


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"10%\r50%\r100%\n", "100%\n"),
        (b"a\r\nb\r\r\n", "a\nb\n"),
        (b"\x1b[31mred\x1b[0m \x1b[?2004hx\x1b[K\n", "red x\n"),
        (b"\x1b]0;title\x07shown \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "shown link\n"),
        (b"bo\x08oldd\x08d", "boldd"),
        (b"nul\0 bell\x07 tab\t end", "nul bell tab\t end"),
        ("é".encode() + b"\xff", "é\ufffd"),
        (b"spinner |\r", "spinner |"),
    ],
)
def test_terminal_bytes_become_readable_text(raw, text):
    assert clean(raw) == text


@pytest.mark.parametrize(
    "raw",
    [
        b"a" * 32000 + b"\x08" * 32000,
        b"\r" * 32000 + b"a",
        b"\x1b[" * 32000,
        b"\x1b]" * 32000,
        b"\x1b[" + b"0;" * 32000,
    ],
)
def test_no_bytes_take_long_to_read(raw):
    """Work that grows with the square of the output would be ten seconds here, and cost the job its sandbox."""
    started = time.process_time()
    clean(raw)
    assert time.process_time() - started < 1


def test_output_keeps_head_and_tail_however_it_comes():
    output = BoundedOutput(100)
    for _ in range(10_000):
        output.append(b"x" * 997)
    output.append(b"THE END")
    text = output.text()
    assert text.startswith("xxxx")
    assert text.endswith("THE END")
    assert f"{10_000 * 997 + 7 - 100} bytes left out" in text
    assert len(text) < 200


def test_short_output_is_whole():
    output = BoundedOutput(100)
    for byte in b"0123456789" * 10:
        output.append(bytes([byte]))
    assert output.text() == "0123456789" * 10


def test_fit_does_not_cut_characters():
    assert "\ufffd" not in fit("é" * 1000, 101)


def test_frames_survive_any_cutting():
    frames = [({"id": n}, bytes(range(256)) * n) for n in range(5)]
    stream = b"".join(pack(*frame) for frame in frames)
    buffer = FrameBuffer()
    assert [frame for byte in stream for frame in buffer.feed(bytes([byte]))] == frames


@pytest.mark.parametrize(
    "stream", [b"\xff" * 8, b"\0\0\0\x02\0\0\0\0[]", b"\0\0\0\x01\0\0\0\0{", b"\0\0\0\x01\xff\0\0\0{"]
)
def test_what_is_no_frame_is_refused(stream):
    with pytest.raises(FrameError):
        list(FrameBuffer().feed(stream))


def test_a_frame_over_the_limit_is_not_sent():
    with pytest.raises(FrameError):
        pack({"id": 1}, b"x" * (MAX_BODY_BYTES + 1))
