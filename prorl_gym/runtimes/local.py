"""No isolation at all: a process tree in a folder of its own. For tests, and for hosts that forbid namespaces."""

from pathlib import Path

from prorl_gym.runtimes.process import ProcessRuntime


class LocalRuntime(ProcessRuntime):
    """The agent sees the whole host, as an unprivileged user when the service is root.

    The working directory lies in the sandbox's own folder, whatever `spec.workdir` says: an absolute path of the host
    would be shared between jobs.
    """

    folders = ("workspace", "home", "tmp")

    def _command(self, folder: Path, tool_server: list[str]) -> list[str]:
        return tool_server

    def _seals(self) -> bool:
        return False  # its network is the host's, whatever is asked for

    def _inside(self) -> bool:
        return False

    def _workdir(self, folder: Path) -> str:
        return str(folder / "workspace")

    def _environment(self, folder: Path) -> dict[str, str]:
        places = {
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "IPYTHONDIR": str(folder / "tmp/.ipython"),
        }
        return {**super()._environment(folder), **places, **self.spec.env}

    def _unenforced(self) -> tuple[str, ...]:
        limits = ("disk", "network", "isolation")
        return limits if self._holds_processes() else ("processes", *limits)
