"""Builds images from definitions and fetches those that data sets name, each once."""

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prorl_gym import __version__
from prorl_gym.config.models import ImagesConfig, ProrlConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.images.definition import Definition, find_definition, find_definitions
from prorl_gym.runtimes.images.program import ApptainerProgram, ImageError
from prorl_gym.runtimes.images.recipe import BuildMode, Recipe
from prorl_gym.runtimes.images.source import ImageSource, parse_source
from prorl_gym.runtimes.images.store import ImageRecord, ImageStore, StoredImage, image_file, size_of

_PACKING = ("--mksquashfs-args", "-wildcards -e dev/*")
"""For a local folder: owners are kept without any privilege, device nodes, which no sandbox could use, are left out."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """An image that is there now.

    Attributes:
        path: Of the .sif file or the folder.
        image: Its place in the store; None when it is used where it lies.
        made: Whether this call made it; False when it was there, or somebody else made it meanwhile.
        stale: What has changed since without making it another image: `lock file`, `sources`.
    """

    path: Path
    image: StoredImage | None
    made: bool
    stale: tuple[str, ...] = ()


class RuntimeImageBuilder:
    """One service's or command's way to images. Methods may run at once, also on other hosts with the same store."""

    def __init__(self, config: ProrlConfig, *, framework_version: str = __version__) -> None:
        self._config: ImagesConfig = config.images
        self._roots = config.roots
        self._version = framework_version
        self._slots = asyncio.Semaphore(config.images.parallel)
        self._program = ApptainerProgram(config.paths.state)
        self.store = ImageStore(config.paths.images)
        unknown = {*config.images.bases, *config.images.values} - find_definitions(self._roots).keys()
        for name in sorted(unknown):
            find_definition(self._roots, name)  # says which are known

    def definitions(self) -> dict[str, Definition]:
        """What can be built."""
        return find_definitions(self._roots)

    def render(self, name: str) -> str:
        """The text that Apptainer would be given.

        Raises:
            ConfigError: No such definition, or it does not render.
        """
        definition = find_definition(self._roots, name)
        return definition.render(self._base(definition), self._values(definition), self._version)

    async def locate(self, reference: str) -> Path:
        """The image of a definition or a source that is there already; nothing is built or fetched.

        Raises:
            ConfigError: It is not there; the message has the command that gets it.
        """
        definition = self.definitions().get(reference)
        if definition is None:
            source = parse_source(reference)
            recipe = await asyncio.to_thread(self._pull_recipe, source)
            if source.kind == "path":
                return Path(source.location)
            found = self.store.find(str(source), recipe, "lock")
            advice = f"python -m prorl_gym images pull '{source}'"
        else:
            recipe = await asyncio.to_thread(self._recipe, definition)
            found = self.store.find(reference, recipe, self._mode(definition))
            advice = f"python -m prorl_gym images build {reference}"
        if found is None:
            raise ConfigError(f"image {reference} is not in {self.store.root}; get it with: {advice}")
        await asyncio.to_thread(self.store.touch, found)
        return found.path

    async def build(self, name: str) -> Obtained:
        """The image of a definition, built unless one that counts as the same is there.

        Raises:
            ConfigError: No such definition, it does not render, or Apptainer is missing.
            ImageError: The build failed; ends with Apptainer's last lines.
        """
        definition = find_definition(self._roots, name)
        mode = self._mode(definition)
        recipe = await asyncio.to_thread(self._recipe, definition)

        async def make(folder: Path) -> None:
            base = await self._unpackable(self._base(definition), folder)
            text = definition.render(base, self._values(definition), self._version)
            (folder / "image.def").write_text(text)
            await self._apptainer(folder, self._privilege, str(folder / "image.def"), cwd=definition.folder)

        return await self._obtain(name, "built", recipe, mode, make)

    async def pull(self, reference: str) -> Obtained:
        """The image of a source, fetched or packed unless it is there; a bare path is used where it lies.

        With `images.mode=scratch` it is fetched anew, which is how a tag that moved is followed.

        Raises:
            ConfigError: No source, a local one that does not exist, or Apptainer is missing.
            ImageError: It could not be fetched; ends with Apptainer's last lines.
        """
        source = parse_source(reference)
        recipe = await asyncio.to_thread(self._pull_recipe, source)
        if source.kind == "path":
            return Obtained(Path(source.location), None, made=False)
        if source.kind == "debootstrap":
            raise ConfigError(f"image {source}: a base for definitions, it cannot be fetched as it is")

        async def make(folder: Path) -> None:
            if source.kind in {"docker", "oras"} and self._config.format == "sif":
                # Needs no privilege, and leaves a .sif from ORAS as it is, signatures included.
                target = str(folder / image_file("sif"))
                await self._run(folder, ["pull", *self._registry, target, str(source)], cwd=folder)
            elif source.kind != "localimage":
                await self._apptainer(folder, self._unpacking, str(source), cwd=folder)
            elif self._config.format == "directory":
                base = await self._unpackable(source, folder)
                await self._apptainer(folder, self._unpacking, str(base and base.location), cwd=folder)
            elif source.is_folder:
                await self._apptainer(folder, _PACKING, source.location, cwd=folder)
            else:
                await asyncio.to_thread(shutil.copyfile, source.location, folder / image_file("sif"))

        mode: BuildMode = "scratch" if self._config.mode == "scratch" else "lock"
        return await self._obtain(str(source), "pulled", recipe, mode, make)

    async def _obtain(
        self,
        name: str,
        origin: Literal["built", "pulled"],
        recipe: Recipe,
        mode: BuildMode,
        make: Callable[[Path], Awaitable[None]],
    ) -> Obtained:
        try:
            return await self._once(name, origin, recipe, mode, make)
        except OSError as error:
            raise ImageError(f"cannot be written to {self.store.root}: {error}") from error

    async def _once(
        self,
        name: str,
        origin: Literal["built", "pulled"],
        recipe: Recipe,
        mode: BuildMode,
        make: Callable[[Path], Awaitable[None]],
    ) -> Obtained:
        before = self.store.find(name, recipe, mode)
        if before is not None and mode != "scratch":
            return self._reused(before, recipe)

        def made_meanwhile() -> Obtained | None:
            now = self.store.find(name, recipe, mode)
            is_new = now is not None and (before is None or now.folder != before.folder)
            return self._reused(now, recipe) if now is not None and is_new else None

        async with self._slots, self.store.lock(name, recipe):
            if obtained := made_meanwhile():
                return obtained  # from the same recipe, so it is fresh too
            partial = await asyncio.to_thread(self.store.new_partial, name, recipe)
            try:
                began = time.monotonic()
                await make(partial)
                seconds = time.monotonic() - began
                record = await asyncio.to_thread(_record, partial, name, origin, recipe, seconds)
                if obtained := made_meanwhile():
                    return obtained  # this process was taken for dead, and another did the work
                image = self.store.publish(partial, record)
                return Obtained(image.path, image, made=True)
            finally:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True))

    def _reused(self, image: StoredImage, wanted: Recipe) -> Obtained:
        self.store.touch(image)
        return Obtained(image.path, image, made=False, stale=image.record.recipe.changed_since(wanted))

    async def _unpackable(self, base: ImageSource | None, folder: Path) -> ImageSource | None:
        """The base; a local folder is packed first, as it lies it unpacks only where device nodes can be made."""
        if base is None or not base.is_folder:
            return base
        packed = folder / "base.sif"
        quick = [_PACKING[0], f"-comp gzip -Xcompression-level 1 {_PACKING[1]}"]
        await self._run(folder, ["build", *quick, str(packed), base.location], cwd=folder)
        return ImageSource("localimage", str(packed))

    async def _apptainer(self, folder: Path, options: Sequence[str], spec: str, *, cwd: Path) -> None:
        form = self._config.format
        options = [*(["--sandbox"] if form == "directory" else []), *options, *self._registry]
        await self._run(folder, ["build", *options, str(folder / image_file(form)), spec], cwd=cwd)
        (folder / "base.sif").unlink(missing_ok=True)

    async def _run(self, folder: Path, arguments: Sequence[str], *, cwd: Path) -> None:
        await self._program.run(arguments, cwd=cwd, log=folder / "build.log", timeout_s=self._config.timeout_s)

    @property
    def _registry(self) -> list[str]:
        credentials = ["--authfile", str(self._config.auth_file)] if self._config.auth_file else []
        return [*credentials, *(["--no-https"] if self._config.plain_http else [])]

    @property
    def _privilege(self) -> list[str]:
        return ["--fakeroot"] if self._config.fakeroot else []

    @property
    def _unpacking(self) -> list[str]:
        """An ordinary user unpacks files as its own; root in a container, short of capabilities, needs fakeroot."""
        return self._privilege if os.geteuid() == 0 else []

    def _recipe(self, definition: Definition) -> Recipe:
        base = self._base(definition)
        text = definition.render(base, self._values(definition), "")
        return Recipe(
            definition=hashlib.sha256(text.encode()).hexdigest(),
            base=None if base is None else base.identity(),
            framework_version=self._version,
            lock=definition.lock_digest(),
            sources=definition.sources_digest(),
            format=self._config.format,
        )

    def _pull_recipe(self, source: ImageSource) -> Recipe:
        return Recipe(base=source.identity(), format=self._config.format)

    def _base(self, definition: Definition) -> ImageSource | None:
        text = self._config.bases.get(definition.name, definition.settings.base)
        return None if text is None else parse_source(text)

    def _values(self, definition: Definition) -> dict[str, object]:
        return {**definition.settings.values, **self._config.values.get(definition.name, {})}

    def _mode(self, definition: Definition) -> BuildMode:
        return self._config.mode if self._config.mode == "scratch" else definition.settings.mode or self._config.mode


def _record(folder: Path, name: str, origin: Literal["built", "pulled"], recipe: Recipe, seconds: float) -> ImageRecord:
    """What is known of a made image. Blocks: a .sif is read once."""
    image = folder / image_file(recipe.format)
    if recipe.format == "sif":
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        digest = hashlib.sha256(folder.name.encode()).hexdigest()
    return ImageRecord(
        name=name, origin=origin, recipe=recipe, digest=digest, size_bytes=size_of(image), created=time.time(),
        seconds=round(seconds, 2),
    )  # fmt: skip
