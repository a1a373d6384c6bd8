"""The `apptainer` program, with caches, temporary files and settings of its own: never in the user's home."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from prorl_gym.errors import ConfigError, ProrlGymError

_PASSED_ON = frozenset({
    "PATH", "LANG", "LC_ALL", "TZ", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
})  # fmt: skip
_GRACE_S = 10.0
_SHOWN_LINES = 15


class ImageError(ProrlGymError):
    """An image could not be made; the message ends with what the program said last."""


class ApptainerProgram:
    """Runs `apptainer` for builds and fetches.

    Args:
        state: Node-local (`paths.state`): unpacking on a shared file system is slow and, rootless, often refused.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / "apptainer"

    @property
    def cache(self) -> Path:
        """Layers of fetched images, safe to delete when nothing is being fetched."""
        return self._folder / "cache"

    def find(self) -> str:
        """Path of the program.

        Raises:
            ConfigError: It is not installed; says how to get it.
        """
        if found := shutil.which("apptainer"):
            return found
        raise ConfigError(
            "apptainer is not on PATH: load your cluster's module, install the distribution's package, or see "
            "README.md, Apptainer"
        )

    def environment(self) -> dict[str, str]:
        """Everything the program gets to see; its folders are created."""
        folders = {
            "APPTAINER_CACHEDIR": self.cache,
            "APPTAINER_TMPDIR": self._folder / "tmp",
            "APPTAINER_CONFIGDIR": self._folder / "settings",
            "HOME": self._folder / "home",
        }
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        passed = {name: value for name, value in os.environ.items() if name in _PASSED_ON}
        return {**passed, **{name: str(folder) for name, folder in folders.items()}, "NO_COLOR": "1"}

    async def run(self, arguments: Sequence[str], *, cwd: Path, log: Path, timeout_s: float) -> None:
        """Run to the end; output goes to `log`. Cancelling ends the whole process group.

        Raises:
            ConfigError: The program is not installed.
            ImageError: It failed or took longer than `timeout_s`.
        """
        command = [self.find(), *arguments]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=cwd, env=self.environment(), stdin=asyncio.subprocess.DEVNULL,
                stdout=output, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                async with asyncio.timeout(timeout_s):
                    status = await process.wait()
            except TimeoutError:
                raise ImageError(f"not done after {timeout_s:g} s{_tail(log)}") from None
            finally:
                await asyncio.shield(_end(process))
        if status != 0:
            raise ImageError(f"apptainer {arguments[0]} failed with status {status}{_tail(log)}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """TERM, grace, KILL over the group that we started, if it has not ended by itself."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        os.killpg(process.pid, signal.SIGKILL)  # also what the leader left in its group
    await process.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return ":\n" + "\n".join(f"    {line}" for line in lines[-_SHOWN_LINES:]) if lines else ""
