"""Drives one interpreter: calls in order, with limits on time and output, whatever the text does.

The invariants: a call always ends within its limit plus the grace of the ladder interrupt → kill → restart; what was
printed so far is kept; a restart, and with it the loss of state, is told to the model; output that arrives between two
calls is never taken for output of the next.
"""

import errno
import os
import queue
import secrets
import select
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .children import Children
from .interpreter import Interpreter, StartFailed, end_mark
from .output import BoundedOutput

_CHUNK = 1 << 16
_CHUNKS_PER_TURN = 64
_HARD_AFTER_S = 1.0
_HARD_EVERY_S = 0.1
_KILL_AFTER_S = 2.0
_MARK_WAIT_S = 1.0
_MUTE_LOOK_S = 0.5
_SETTLE_S = 0.05
"""An interrupt before the piece has begun would be lost, or cost the interpreter the line that it was reading."""
_BACKGROUND_BYTES = 4096


@dataclass(slots=True)
class Reply:
    """What a call gave; the wire's header and body."""

    text: str
    error: bool = False
    timed_out: bool = False
    exit_code: int | None = None
    duration_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    """What broke in the tool server itself; then there is no answer."""


@dataclass(slots=True, eq=False)
class Call:
    """One request to run a piece of text; `answer` is called exactly once."""

    text: str
    deadline: float
    timeout_s: float
    answer: Callable[[Reply], None]
    cancelled: bool = False


class Session:
    """One interpreter and the thread that drives it."""

    def __init__(self, interpreter: Interpreter, children: Children, output_bytes: int) -> None:
        self.interpreter = interpreter
        self.children = children
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.output = BoundedOutput(output_bytes)
        self.background = BoundedOutput(_BACKGROUND_BYTES)
        threading.Thread(target=self._serve, name=interpreter.title, daemon=True).start()

    def submit(self, call: Call) -> None:
        """Queue a call."""
        self._calls.put(call)
        os.eventfd_write(self.wake, 1)

    def cancel(self, call: Call) -> None:
        """Interrupt the call if it runs, drop it if it waits; it is still answered."""
        call.cancelled = True
        os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """End the interpreter, from any thread, when the tool server ends."""
        self.interpreter.kill()

    def _serve(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                self._idle()
                continue
            started = time.monotonic()
            try:
                if call.cancelled or started >= call.deadline:
                    reply = Reply(f"[not started: the {self.interpreter.title} was busy]", error=True, timed_out=True)
                else:
                    reply = _Run(self, call).run()
            except StartFailed as error:
                reply = Reply(f"[{error}]", error=True)
            except Exception:  # noqa: BLE001 - a fault of the tool server itself: told to the host, never to the model
                reply = Reply("", failed=traceback.format_exc())
                self.interpreter.kill()
            reply.duration_s = time.monotonic() - started
            call.answer(reply)

    def _idle(self) -> None:
        """Wait for the next call; what background processes print meanwhile is drained so that they never block."""
        interpreter = self.interpreter
        wanted = [self.wake]
        if interpreter.pid is not None:
            wanted += [interpreter.output_fd, interpreter.pid_fd]
        poll = select.poll()
        for descriptor in wanted:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if self.wake in ready:
            _drain_event(self.wake)
        if interpreter.pid is not None and interpreter.output_fd in ready:
            chunk = _read(interpreter.output_fd)
            if chunk:
                self.background.append(chunk)
            elif chunk is not None:
                poll.unregister(interpreter.output_fd)
                poll.poll(1000)  # nobody holds the output any more: the end of the process follows at once
        if interpreter.pid is not None and interpreter.pid_fd in ready:
            interpreter.kill()  # it ended on its own; the next call starts another and says so
            self.background.append(f"\n[the {interpreter.title} ended: {interpreter.lost}]\n".encode())


class _Run:
    """One call being run."""

    def __init__(self, session: "Session", call: Call) -> None:
        self._interpreter = session.interpreter
        self._children = session.children
        self._output = session.output
        self._background = session.background
        self._wake = session.wake
        self._call = call
        self._nonce = secrets.token_hex(8)
        self._mark = end_mark(self._nonce)
        self._pending = b""
        self._marked = False
        self._status_text = b""
        self._status: int | None = None
        self._status_at = 0.0
        self._ended = False
        self._output_closed = False
        self._timed_out = False
        self._mute = False
        self._next_look = time.monotonic() + _MUTE_LOOK_S
        self._settled_at = time.monotonic() + _SETTLE_S
        self._was_mute = False

    def run(self) -> Reply:
        interpreter, notes = self._interpreter, []
        self._output.clear()
        if interpreter.pid is None:
            interpreter.start()
        try:
            interpreter.submit(self._call.text, self._nonce)
        except OSError:  # it died since the last look
            interpreter.kill()
            notes.append(f"the {interpreter.title} had ended and a new one was started: {interpreter.lost}")
            interpreter.start()
            interpreter.submit(self._call.text, self._nonce)
        killed = self._wait()
        if self._pending:
            self._output.append(self._pending)
        if self._timed_out:
            why = (
                "interrupted" if self._call.cancelled else f"timed out after {self._call.timeout_s:g} s and interrupted"
            )
            notes.append(why + "; the output so far is above")
        if self._ended or killed:
            notes.append(self._restart(killed))
        return self._reply(notes)

    def _restart(self, killed: bool) -> str:
        interpreter = self._interpreter
        status = None if killed or interpreter.pid is None else self._children.status(interpreter.pid)
        self._status = self._status if status is None else status
        folder = interpreter.folder()
        interpreter.kill()
        if self._mute:
            what = "no longer tells when a command has ended, as when `builtin` is redefined, and was killed"
        elif killed:
            what = "did not react and was killed"
        else:
            what = "ended" if status is None else f"ended with status {status}"
        try:
            interpreter.start()
        except StartFailed as error:
            return f"the {interpreter.title} {what}: {interpreter.lost}; {error}"
        where = interpreter.folder() or folder
        return f"the {interpreter.title} {what}; a new one was started in {where}: {interpreter.lost}"

    def _reply(self, notes: list[str]) -> Reply:
        code = None if self._timed_out else self._status
        details = {"cwd": folder} if (folder := self._interpreter.folder()) else {}
        text = self._output.text()
        if self._background:
            late = self._background.text().strip("\n")
            self._background.clear()
            if late:
                text = f"[printed by background activity before this call]\n{late}\n[output of this call]\n{text}"
        if code and (self._interpreter.has_exit_codes or self._ended):
            notes.insert(0, f"exit code {code}" if code > 0 else f"killed by signal {-code}")
        if notes:
            text = text + ("" if not text or text.endswith("\n") else "\n") + "\n".join(f"[{n}]" for n in notes)
        return Reply(
            text,
            error=bool(code) or self._timed_out or self._ended or self._mute,
            timed_out=self._timed_out,
            exit_code=code if self._interpreter.has_exit_codes else None,
            details=details,
        )

    def _wait(self) -> bool:
        """Returns True when the interpreter had to be killed."""
        interpreter = self._interpreter
        poll = select.poll()
        for descriptor in (interpreter.output_fd, interpreter.status_fd, interpreter.pid_fd, self._wake):
            poll.register(descriptor, select.POLLIN)
        interrupted_at = next_step = 0.0
        while True:
            now = time.monotonic()
            if self._done(now):
                return False
            if not interrupted_at and self._falls_silent(now):
                return True
            due = max(0.0 if self._call.cancelled else self._call.deadline, self._settled_at)
            if not interrupted_at and now >= due:
                interrupted_at, next_step = now, now + _HARD_AFTER_S
                self._timed_out = True
                interpreter.interrupt(self._nonce, hard=False)
            elif interrupted_at and now >= next_step:
                if now >= interrupted_at + _KILL_AFTER_S:
                    return True
                interpreter.interrupt(self._nonce, hard=True)
                next_step = now + _HARD_EVERY_S
            until = next_step if interrupted_at else min(due, self._next_look)
            if self._status is not None:
                until = min(until, self._status_at + _MARK_WAIT_S)
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, until - now) * 1000 + 0.5)}
            if self._wake in ready:  # this call was cancelled, or another one waits
                _drain_event(self._wake)
            if interpreter.output_fd in ready:
                self._read_output(poll)
            if interpreter.status_fd in ready:
                self._read_status(poll)
            if interpreter.pid_fd in ready:
                self._read_output(poll)  # what it left in the pipe
                self._ended = not self._done(now)

    def _falls_silent(self, now: float) -> bool:
        """Whether two looks in a row found that no report can come any more."""
        if now >= self._next_look:
            mute = self._status is None and self._interpreter.is_mute()
            self._mute = mute and self._was_mute
            self._was_mute, self._next_look = mute, now + _MUTE_LOOK_S
        return self._mute

    def _done(self, now: float) -> bool:
        if self._ended:
            return True
        return self._status is not None and (self._marked or now >= self._status_at + _MARK_WAIT_S)

    def _read_output(self, poll: select.poll) -> None:
        for _ in range(_CHUNKS_PER_TURN):  # bounded, so that a flood cannot starve the deadline
            chunk = _read(self._interpreter.output_fd)
            if not chunk:
                if chunk is not None and not self._output_closed:
                    self._output_closed = True
                    poll.unregister(self._interpreter.output_fd)
                return
            if self._marked:
                self._background.append(chunk)
                return
            window = self._pending + chunk
            at = window.find(self._mark)
            if at >= 0:
                self._output.append(window[:at])
                self._pending, self._marked = b"", True
                if rest := window[at + len(self._mark) :]:
                    self._background.append(rest)
                return
            keep = len(self._mark) - 1
            self._output.append(window[:-keep])
            self._pending = window[-keep:]

    def _read_status(self, poll: select.poll) -> None:
        chunk = _read(self._interpreter.status_fd) or b""
        if not chunk:
            poll.unregister(self._interpreter.status_fd)
        *lines, rest = (self._status_text + chunk).split(b"\n")
        self._status_text = rest[-256:]
        for line in lines:
            words = line.split()
            if len(words) == 2 and words[0] == self._nonce.encode() and words[1].isdigit():
                self._status, self._status_at = int(words[1]), time.monotonic()


def _read(descriptor: int) -> bytes | None:
    """What can be read now: None for nothing yet, empty for never again."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno == errno.EIO:  # a terminal nobody holds any more
            return b""
        raise


def _drain_event(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return
