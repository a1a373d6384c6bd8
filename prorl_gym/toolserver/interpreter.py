"""A persistent process that runs pieces of text, one after the other: the shell, or the Python session.

Contract between such a process and `Session`, which drives it: each piece carries a nonce. When the piece has ended the
process writes `end_mark(nonce)` to its output and the line `NONCE STATUS` to its status descriptor. The output mark is
behind everything that was printed; the status line cannot be forged by output. Both must have come.
"""

import os
from abc import ABC, abstractmethod


def end_mark(nonce: str) -> bytes:
    """What stands in the output stream behind the last byte of a piece; an escape sequence that no program prints."""
    return f"\x1b]prorl:{nonce}\x07".encode()


class StartFailed(Exception):
    """The process could not be started; the message is for the model."""


class Interpreter(ABC):
    """One such process, possibly not running."""

    title: str
    """How the model is told of it, e.g. `shell`."""
    lost: str
    """What is gone after a restart, e.g. `variables and functions are gone`."""

    has_exit_codes: bool
    """Whether the status of a piece is an exit code, to be shown, or only tells success (0) from failure."""

    pid: int | None = None
    pid_fd: int = -1
    output_fd: int = -1
    status_fd: int = -1

    @abstractmethod
    def start(self) -> None:
        """Start the process and set pid and descriptors, which do not block.

        Raises:
            StartFailed: It could not be started.
        """

    @abstractmethod
    def submit(self, text: str, nonce: str) -> None:
        """Have a piece of text run.

        Raises:
            OSError: The process is gone.
        """

    @abstractmethod
    def interrupt(self, nonce: str, *, hard: bool) -> None:
        """Ask the running piece to end; `hard` ends what it started by force. Harmless when the process is gone."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and close its descriptors; harmless when there is none."""

    def is_mute(self) -> bool:
        """Whether it waits for more to do: when the piece's end was not reported by then, it never will be."""
        return False

    @abstractmethod
    def folder(self) -> str | None:
        """Its working directory, None when it cannot be told."""

    def _close_descriptors(self) -> None:
        for name in ("pid_fd", "output_fd", "status_fd"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)
