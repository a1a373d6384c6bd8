"""Where an image, or the base of one, comes from.

The invariant: a source's text holds no line break, no brace, no leading dash and no `..`, so that it can stand in a
definition's header and on a command line without meaning anything else there. Sources may come from untrusted rows.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prorl_gym.errors import ConfigError

SourceKind = Literal["docker", "oras", "docker-archive", "oci-archive", "localimage", "debootstrap", "path"]
KINDS: tuple[SourceKind, ...] = ("docker", "oras", "docker-archive", "oci-archive", "localimage", "debootstrap")
FORMS = (
    "docker://NAME:TAG (or NAME:TAG), oras://HOST/NAME:TAG, localimage:/FILE.sif or /FOLDER, docker-archive:/FILE.tar, "
    "oci-archive:/FILE.tar, debootstrap:SUITE@MIRROR"
)

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_FILE = re.compile(r"/[^\x00-\x1f\x7f{}]*")
_DEBOOTSTRAP = re.compile(r"(?P<suite>[A-Za-z0-9][A-Za-z0-9._-]*)@(?P<mirror>https?://[A-Za-z0-9._/:~%@+-]+)")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One source.

    Attributes:
        kind: `path` is a .sif or a folder that is used where it lies; `localimage` is the same, to be copied or packed.
        location: What follows the kind.
    """

    kind: SourceKind
    location: str

    def __str__(self) -> str:
        """The one canonical way to write it."""
        if self.kind == "path":
            return self.location
        return f"{self.kind}{'://' if self.kind in {'docker', 'oras'} else ':'}{self.location}"

    @property
    def is_local(self) -> bool:
        """Whether it is a file or folder of this host."""
        return self.location.startswith("/")

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this host."""
        return self.is_local and Path(self.location).is_dir()

    def header(self) -> str:
        """The first lines of a definition that starts from it."""
        if self.kind == "debootstrap":
            suite, mirror = self.location.split("@", 1)
            return f"Bootstrap: debootstrap\nOSVersion: {suite}\nMirrorURL: {mirror}"
        return f"Bootstrap: {'localimage' if self.kind == 'path' else self.kind}\nFrom: {self.location}"

    def identity(self) -> str:
        """Changes when what it names changes, as far as this host can see: a tag that moved at its hub is not seen.

        Blocks: a folder is walked.

        Raises:
            ConfigError: A local one that does not exist, or is neither .sif nor folder.
        """
        if not self.is_local:
            return str(self)
        path = Path(self.location)
        if path.is_dir():
            return f"{self}#{_folder_fingerprint(path)}"
        try:
            facts = path.stat()
        except OSError as error:
            raise ConfigError(f"image {self}: {error.strerror or error}") from None
        if self.kind in {"path", "localimage"} and path.suffix != ".sif":
            raise ConfigError(f"image {self}: neither a folder nor a .sif file")
        return f"{self}#{facts.st_size}-{facts.st_mtime_ns}"


def parse_source(text: str) -> ImageSource:
    """Read a source; a bare name is a Docker one, as in SWE data sets; a bare path is used where it lies.

    Raises:
        ConfigError: It is none; says what would be.
    """
    if text.startswith("/"):
        return ImageSource("path", _checked(text, text, _FILE))
    for kind in KINDS:
        if text.startswith(f"{kind}:"):
            rest = text[len(kind) + 1 :]
            if kind in {"docker", "oras"} and rest.startswith("//"):
                return ImageSource(kind, _checked(text, rest[2:], _REFERENCE))
            if kind == "debootstrap":
                return ImageSource(kind, _checked(text, rest, _DEBOOTSTRAP))
            if kind not in {"docker", "oras"}:
                return ImageSource(kind, _checked(text, rest.removeprefix("//"), _FILE))
    if "://" in text:
        raise ConfigError(f"image {text[:200]!r}: not a source that is understood; write {FORMS}")
    return ImageSource("docker", _checked(text, text, _REFERENCE))


def _checked(text: str, location: str, shape: re.Pattern[str]) -> str:
    if not shape.fullmatch(location) or ".." in location.split("/"):
        raise ConfigError(f"image {text[:200]!r}: write {FORMS}; local paths are absolute")
    return location


def _folder_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                facts = entry.stat(follow_symlinks=False)
                mode, size, changed = facts.st_mode, facts.st_size, facts.st_mtime_ns
                digest.update(f"{entry.path}\0{mode}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return digest.hexdigest()[:16]
