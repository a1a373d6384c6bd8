"""Shuts a helper process of the service in: no network, nothing of the host but what it needs to read."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
PYTHON_FOLDERS = tuple(dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix))))
"""What this interpreter needs beside the system's libraries: a virtual environment and the Python it was made from."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """Wraps commands in bubblewrap.

    Attributes:
        bwrap: Path of the program; see `runtimes.bubblewrap.bubblewrap_program`.
    """

    bwrap: str

    def __call__(self, command: Sequence[str], readable: Sequence[Path]) -> list[str]:
        """`command`, seeing the system's libraries, this Python and `readable`, all of it read-only.

        It runs as nobody, in namespaces of its own, and dies with the thread that starts it.
        """
        arguments = [
            self.bwrap,
            *("--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
            *("--uid", "65534", "--gid", "65534", "--hostname", "grader"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp"),  # noqa: S108 - its own
        ]
        for folder in map(Path, SYSTEM_FOLDERS):
            if folder.is_symlink():
                arguments += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.is_dir():
                arguments += ["--ro-bind", str(folder), str(folder)]
        for path in dict.fromkeys((*PYTHON_FOLDERS, *readable)):
            arguments += ["--ro-bind", str(path.resolve()), str(path)]
        return [*arguments, "--chdir", "/", "--", *command]
