"""Images as .sif files or folders, by Apptainer: rootless, no daemon, for clusters.

The tool server is PID 1 of the sandbox, as in bubblewrap. Apptainer's own processes outside it (the starter, and for a
.sif squashfuse and fuse-overlayfs) belong to the session of the recorded process and end with it.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pwd
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_gym.errors import ConfigError, RuntimeStartError
from prorl_gym.runtimes.base import RuntimeInfo, SandboxSpec
from prorl_gym.runtimes.host import Host, UidLease, public_folder
from prorl_gym.runtimes.process import ProcessRuntime, counts_per_namespace
from prorl_gym.runtimes.toolenv import MOUNT_POINT

ImageLocator = Callable[[str], Awaitable[Path]]
"""From what a row or the configuration calls an image to its place; ConfigError says how to get it."""

NO_IMAGE = (
    "apptainer needs an image: set runtime.image (or an agent's sandbox.image) to a .sif file or a root filesystem "
    "folder, or to the name of one from `python -m prorl_gym images build`; any stock image will do, `apptainer pull "
    "python.sif docker://python:3.12-slim` gets one"
)
_AGENT_HOME = "/home/agent"
_SUB_IDS = 65_536
"""As many as --fakeroot wants."""
_MIB = 1 << 20
_NO_LIMIT_MB = 1 << 40


@dataclass(frozen=True, slots=True)
class ApptainerSetup:
    """How Apptainer is run on this host, as the start-up probe found it to work.

    Attributes:
        program: Path of `apptainer`.
        own_user: Whether each sandbox gets an unprivileged host user of its own: where the service is root and may
            mount, so that Apptainer finds that user in an /etc/passwd made for it.
        own_settings: Whether it takes a configuration file from us, in which the size of what a sandbox writes is set;
            an installation with set-user-id programs refuses that.
    """

    program: str
    own_user: bool = False
    own_settings: bool = True


def apptainer_program() -> str:
    """Path of `apptainer`.

    Raises:
        ConfigError: It is not installed; says how to get it.
    """
    if found := shutil.which("apptainer"):
        return found
    raise ConfigError(
        "apptainer is not on PATH: load your cluster's module, install the distribution's package, or see README.md, "
        "Sandboxes (it can also be installed without any privilege)"
    )


def setups(program: str) -> list[ApptainerSetup]:
    """Ways of running it on a host like this one, the most confining first."""
    users = [True, False] if _may_mount() else [False]
    return [ApptainerSetup(program, own_user, own) for own_user in users for own in (True, False)]


def maps_many_users(setup: ApptainerSetup) -> bool:
    """Whether `--fakeroot` has ids for other users than root, to whom packages give their files. Blocks."""
    if not shutil.which("newuidmap"):
        return False
    if setup.own_user:
        lease = UidLease.take()
        lease.release()
        return lease.uid is not None and _sub_ids(lease.uid) is not None
    wanted = {str(os.geteuid())}
    with contextlib.suppress(KeyError):
        wanted.add(pwd.getpwuid(os.geteuid()).pw_name)
    for file in ("/etc/subuid", "/etc/subgid"):
        try:
            lines = [line.split(":") for line in Path(file).read_text().splitlines()]
        except OSError:
            return False
        if not any(len(line) == 3 and line[0] in wanted and int(line[2]) >= _SUB_IDS for line in lines):
            return False
    return True


def empty_image(area: Path) -> Path:
    """A folder with nothing in it, which is an image: the tools bring all that they need. Blocks."""
    folder = area / "empty-image"
    for name in ("", "etc", "proc", "dev", "tmp", "root"):
        public_folder(folder / name)
    return folder


def _may_mount() -> bool:
    """Whether this process is root with the right to mount: then sandboxes can have users of their own."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return os.geteuid() == 0 and found is not None and bool(int(found[1], 16) >> 21 & 1)


class ApptainerRuntime(ProcessRuntime):
    """One sandbox from an image that stays as it is; what is written goes to a layer in memory of `limits.disk`."""

    folders = ("home", "tmp", "layer")

    def __init__(
        self, spec: SandboxSpec, host: Host, setup: ApptainerSetup, locate: ImageLocator | None = None
    ) -> None:
        super().__init__(spec, host)
        self._setup = setup
        self._locate = locate
        self._image: Path | None = None
        self._digest: str | None = None

    async def _find_image(self) -> None:
        name = self.spec.image
        if name is None:
            raise RuntimeStartError(NO_IMAGE)
        if name.startswith("/") or self._locate is None:
            path = Path(name)
        else:
            try:
                path = await self._locate(name)
            except ConfigError as error:
                raise RuntimeStartError(str(error)) from error
        self._digest = await asyncio.to_thread(_checked_image, path)
        self._image = path

    def _take_user(self) -> UidLease:
        return UidLease.take() if self._setup.own_user else UidLease(None)

    def _settings(self) -> dict[str, Any]:
        return {
            "image_environment": True,
            "setting_up": self._seals(),
            "disk_bytes": self.spec.limits.disk_bytes if self.spec.fakeroot else None,
        }

    def _environment(self, folder: Path) -> dict[str, str]:
        environment = super()._environment(folder)
        if "PATH" not in self.spec.env:
            del environment["PATH"]  # the image's own
        if self.spec.fakeroot:
            environment.update({"HOME": "/root", "USER": "root", "LOGNAME": "root", **self.spec.env})
        return environment

    def _outer_environment(self, folder: Path) -> dict[str, str]:
        """What Apptainer itself sees: its helpers' PATH, and folders that are not in the user's home."""
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "LANG": "C.UTF-8",
            "HOME": str(folder / "home"),
            "APPTAINER_CONFIGDIR": str(folder / "home"),
            "APPTAINER_CACHEDIR": str(folder / "tmp"),
            "APPTAINER_TMPDIR": str(folder / "tmp"),
            **{name: value for name, value in os.environ.items() if self.spec.gpu and name.startswith("NVIDIA_")},
        }

    def _binds(self, folder: Path, uid: int | None) -> dict[str, str]:
        """An account for the sandbox's user, without which Apptainer does not start, and the image within its reach."""
        if uid is None:
            return {}
        etc, place = folder / "etc", self._place(folder)
        public_folder(etc)
        if self._image is not None and self._image.is_dir():
            public_folder(place)
        else:
            place.touch()
        sub_ids = _sub_ids(uid)
        texts = {
            "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{_AGENT_HOME}:/bin/bash\n",
            "group": f"root:x:0:\nagent:x:{uid}:\n",
            "subuid": f"agent:{sub_ids}:{_SUB_IDS}\n" if sub_ids else "",
        }
        for name, text in texts.items():
            (etc / name).write_text(text)
            (etc / name).chmod(0o644)
        places = {"passwd": "passwd", "group": "group", "subuid": "subuid", "subgid": "subuid"}
        found = {f"/etc/{target}": str(etc / name) for target, name in places.items() if Path("/etc", target).exists()}
        return {**found, str(place): str(self._image)}

    def _place(self, folder: Path) -> Path:
        """Where Apptainer finds the image: a user of the sandbox's own may not pass through the service's folders."""
        if not self._setup.own_user or self._image is None:
            return self._image or folder
        return folder / ("image" if self._image.is_dir() else "image.sif")

    def _command(self, folder: Path, tool_server: list[str]) -> list[str]:
        spec = self.spec
        home = [] if spec.fakeroot else ["--scratch", _AGENT_HOME]
        return [
            self._setup.program, "--silent", *self._settings_file(folder), "exec",
            "--userns", "--containall", "--cleanenv", "--no-home", "--no-mount", "cwd,bind-paths", "--no-eval",
            "--pid", "--no-init", "--ipc", "--hostname", "sandbox",
            *([] if self._shares_network() else ["--net", "--network", "none"]),
            *(["--fakeroot", "--ignore-fakeroot-command"] if spec.fakeroot else []),
            *(["--nv"] if spec.gpu else []),
            *self._layer(folder), *home, "--scratch", "/dev/shm",  # noqa: S108 - inside the sandbox
            "--bind", f"{self._host.tools.folder}:{MOUNT_POINT}:ro",
            str(self._place(folder)), *tool_server,
        ]  # fmt: skip

    def _settings_file(self, folder: Path) -> list[str]:
        if not self._setup.own_settings:
            return []
        size = self.spec.limits.disk_bytes
        path = folder / "apptainer.conf"
        path.write_text(
            f"sessiondir max size = {_NO_LIMIT_MB if size is None else max(1, size // _MIB)}\n"
            "enable overlay = yes\nmount home = no\nmount hostfs = no\n"
        )
        path.chmod(0o644)
        return ["--config", str(path)]

    def _layer(self, folder: Path) -> list[str]:
        if self._setup.own_settings or self.spec.fakeroot:
            return ["--writable-tmpfs"]
        return ["--overlay", str(folder / "layer"), "--workdir", str(folder / "tmp")]

    def _unenforced(self) -> tuple[str, ...]:
        found = [] if self._setup.own_settings or self.spec.fakeroot else ["disk"]
        if not self._holds_processes():
            found.append("processes")
        if os.geteuid() == 0 and not self._setup.own_user:
            found.append("user")
        return tuple(found)

    def _holds_processes(self) -> bool:
        return self._setup.own_user or (os.geteuid() != 0 and counts_per_namespace())

    def describe(self) -> RuntimeInfo:
        """See the base class."""
        image = self.spec.image if self._image is None else str(self._image)
        return dataclasses.replace(super().describe(), image=image, image_digest=self._digest)


def _checked_image(path: Path) -> str | None:
    """What is known of an image's digest. Blocks.

    Raises:
        RuntimeStartError: There is no image.
    """
    if not path.exists():
        raise RuntimeStartError(
            f"image {path} does not exist; `python -m prorl_gym images list` shows what there is, and {NO_IMAGE}"
        )
    if not path.is_dir() and path.suffix != ".sif":
        raise RuntimeStartError(f"image {path} is neither a folder nor a .sif file")
    try:
        return str(json.loads((path.parent / "record.json").read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not from our store


def _sub_ids(uid: int) -> int | None:
    """First of the ids that `--fakeroot` maps beside the sandbox's own; None where there are not enough.

    Of the many ranges above the users', one is picked by the user: two sandboxes rarely share one, and are in separate
    namespaces all the same.
    """
    first = (uid // _SUB_IDS + 2) * _SUB_IDS
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        start, _, count = map(int, line.split())
        ranges = (min(start + count, 1 << 32) - first) // _SUB_IDS - 1
        if start <= first and ranges > 0:
            return first + uid % ranges * _SUB_IDS
    return None


def advice(message: str) -> str:
    """What to do about the ways in which hosts refuse Apptainer."""
    text = message.lower()
    for words, help_text in _ADVICE:
        if any(word in text for word in words):
            return f". {help_text}"
    return ""


FAKEROOT_ADVICE = (
    "--fakeroot wants a line for the service's user in /etc/subuid and /etc/subgid (`usermod --add-subuids "
    "200000-265535 --add-subgids 200000-265535 USER`, as root) and the programs newuidmap and newgidmap (package "
    "uidmap)"
)
_ADVICE = (
    (("subuid", "subgid", "newuidmap", "newgidmap", "fakeroot"), f"{FAKEROOT_ADVICE}; or set runtime.fakeroot=false"),
    (("/dev/fuse", "fuse device", "squashfuse", "fuse-overlayfs", "fusermount"),
     "A .sif is mounted by squashfuse through /dev/fuse: install squashfuse and fuse-overlayfs, load the module fuse "
     "and make /dev/fuse mode 0666, or use a folder as image (images.format=directory)"),
    (("user namespace", "userns", "clone", "operation not permitted", "unshare"),
     "The host refuses unprivileged user namespaces: set sysctl user.max_user_namespaces=15000, "
     "kernel.unprivileged_userns_clone=1 and, on Ubuntu 24.04 and later, "
     "kernel.apparmor_restrict_unprivileged_userns=0"),
    (("sessiondir", "mnt/session"),
     "The installation lacks its session folder: mkdir -p /var/lib/apptainer/mnt/session, as root"),
)  # fmt: skip
