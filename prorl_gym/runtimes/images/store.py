"""The folder of finished images (`paths.images`), which hosts may share.

    SLUG/KEY-ID/image.sif or image/    and record.json
    locks/, partial/, trash/           being built, being deleted

The invariant: what lies under a slug is whole. An image is made under `partial/` together with its record and enters by
one rename; it leaves by one rename too. A finished image is never changed or replaced: a fresh build gets a new ID, and
whoever runs the old one keeps it until it is pruned.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.runtimes.images.build_lock import BuildLock
from prorl_gym.runtimes.images.recipe import BuildMode, ImageFormat, Recipe

_RECORD = "record.json"
_OWN = frozenset({"locks", "partial", "trash"})
_ABANDONED_S = 2 * 86_400.0


class ImageRecord(BaseModel):
    """What an image was made from, written beside it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Of the definition; the source, for a fetched one."""
    origin: Literal["built", "pulled"]
    recipe: Recipe
    digest: str
    """sha256 of the .sif; of the build, for a folder."""
    size_bytes: int
    created: float
    """Unix time."""
    seconds: float


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A finished image.

    Attributes:
        folder: Its own.
        record: What it was made from.
        used: Unix time of the last use.
    """

    folder: Path
    record: ImageRecord
    used: float

    @property
    def path(self) -> Path:
        """What a runtime is given."""
        return self.folder / image_file(self.record.recipe.format)


@dataclass(frozen=True, slots=True)
class Pruned:
    """One thing that `prune` removed, or would remove; `failure` says why it is still there."""

    path: Path
    what: str
    size_bytes: int
    failure: str | None = None


class ImageStore:
    """The images below one folder. Every method is safe while other processes and hosts do the same."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, name: str, wanted: Recipe, mode: BuildMode) -> StoredImage | None:
        """The newest image that the mode accepts."""
        found = [image for image in self._of(self.root / slug(name)) if image.record.recipe.serves(wanted, mode)]
        return max(found, key=lambda image: image.record.created, default=None)

    def images(self) -> list[StoredImage]:
        """All of them, by name, the newest of each first."""
        if not self.root.is_dir():
            return []
        folders = [folder for folder in self.root.iterdir() if folder.is_dir() and folder.name not in _OWN]
        found = [image for folder in folders for image in self._of(folder)]
        return sorted(found, key=lambda image: (image.record.name, -image.record.created))

    def touch(self, image: StoredImage) -> None:
        """Note that it is used now, so that `prune` leaves it; a store that cannot be written is fine."""
        with contextlib.suppress(OSError):
            os.utime(image.folder / _RECORD)

    def lock(self, name: str, recipe: Recipe) -> BuildLock:
        """The lock under which that image is made."""
        return BuildLock(self.root / "locks" / f"{slug(name)}-{recipe.key}")

    def new_partial(self, name: str, recipe: Recipe) -> Path:
        """An empty folder to make the image in. To be called under the lock: what dead owners left of it is removed."""
        stem = f"{slug(name)}-{recipe.key}-"
        partial = self.root / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        for left in partial.glob(f"{stem}*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = partial / f"{stem}{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def publish(self, partial: Path, record: ImageRecord) -> StoredImage:
        """Move a made image to where it is found."""
        (partial / _RECORD).write_text(record.model_dump_json(indent=1) + "\n")
        folder = self.root / slug(record.name) / f"{record.recipe.key}-{partial.name.rpartition('-')[2]}"
        folder.parent.mkdir(exist_ok=True)
        os.rename(partial, folder)
        return StoredImage(folder, record, time.time())

    def prune(self, *, unused_s: float, dry_run: bool = False) -> list[Pruned]:
        """Remove images that nobody used for that long, and what dead builds left.

        A .sif that is in use goes on working; a folder in use would not, so `unused_s` must exceed the longest job.
        """
        now = time.time()
        going: list[tuple[Path, str]] = []
        for image in self.images():
            if (idle_s := now - image.used) >= unused_s:
                going.append((image.folder, f"{image.record.name}, unused {idle_s / 86_400:.1f} days"))
        for own in ("partial", "trash"):
            for left in sorted((self.root / own).glob("*")):
                with contextlib.suppress(FileNotFoundError):
                    if own == "trash" or now - _last_change(left) > _ABANDONED_S:
                        going.append((left, "left by a build or a prune that died"))
        pruned = [Pruned(path, what, size_of(path)) for path, what in going]
        return pruned if dry_run else [self._remove(each) for each in pruned]

    def _remove(self, pruned: Pruned) -> Pruned:
        trash = self.root / "trash" / f"{pruned.path.name}.{secrets.token_hex(4)}"
        try:
            trash.parent.mkdir(exist_ok=True)
            os.rename(pruned.path, trash)
            shutil.rmtree(trash)
        except FileNotFoundError:
            return pruned  # another prune was faster
        except OSError as error:
            return Pruned(pruned.path, pruned.what, pruned.size_bytes, str(error))
        return pruned

    def _of(self, folder: Path) -> Iterator[StoredImage]:
        for record in sorted(folder.glob(f"*/{_RECORD}")):
            with contextlib.suppress(OSError, ValidationError):
                used = record.stat().st_mtime
                yield StoredImage(record.parent, ImageRecord.model_validate_json(record.read_bytes()), used)


def image_file(form: ImageFormat) -> str:
    """Name of the image inside its folder."""
    return "image.sif" if form == "sif" else "image"


def slug(name: str) -> str:
    """A folder's name for a definition or a source: readable, and unique by a digest where it is not the same text."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "+", name).strip("+.")[-80:] or "image"
    plain = f"_{plain}" if plain in _OWN else plain
    return plain if plain == name.replace("/", "+") else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def size_of(path: Path) -> int:
    """Bytes of all files below a path, as far as they can be seen."""
    total = 0
    with contextlib.suppress(OSError):
        total = path.lstat().st_size if not path.is_dir() or path.is_symlink() else 0
        if path.is_dir() and not path.is_symlink():
            for folder, _, files in os.walk(path):
                for file in files:
                    with contextlib.suppress(OSError):
                        total += os.lstat(os.path.join(folder, file)).st_size
    return total


def _last_change(path: Path) -> float:
    return max((each.lstat().st_mtime for each in (path, *path.glob("*"))), default=0.0)
