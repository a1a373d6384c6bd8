"""What an image is made from, and when two of them count as the same.

    mode        definition   lock file   base      framework version   sources
    scratch     every build is fresh
    versioned   rebuilt      reused      rebuilt   rebuilt             reused
    lock        rebuilt      rebuilt     rebuilt   reused              reused

Each image keeps its whole recipe and the mode is asked when one is looked for. So an image built under one mode serves
the others too, and a fresh build replaces what they find.
"""

import hashlib
import platform
from typing import Literal

from pydantic import BaseModel, ConfigDict

ImageFormat = Literal["sif", "directory"]
BuildMode = Literal["scratch", "versioned", "lock"]


class Recipe(BaseModel):
    """All that a made image depends on. A fetched image has only `base` and `format`."""

    model_config = ConfigDict(frozen=True)

    definition: str = ""
    """Digest of the rendered text, values included, the framework's version left blank."""
    base: str | None
    """Identity of the source; None when the definition names its own."""
    format: ImageFormat
    machine: str = platform.machine()
    framework_version: str = ""
    lock: str | None = None
    """Digest of the lock file."""
    sources: str | None = None
    """Digest of what is copied in."""

    @property
    def key(self) -> str:
        """Short digest of what counts in every mode."""
        parts = "\0".join((self.definition, self.base or "", self.format, self.machine))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def serves(self, wanted: "Recipe", mode: BuildMode) -> bool:
        """Whether an image of this recipe may be used where `wanted` is asked for."""
        if mode == "scratch":
            return self == wanted
        if mode == "versioned":
            return self.key == wanted.key and self.framework_version == wanted.framework_version
        return self.key == wanted.key and self.lock == wanted.lock

    def changed_since(self, wanted: "Recipe") -> tuple[str, ...]:
        """What the environment holds now that this image does not: of `lock file` and `sources`."""
        pairs = (("lock file", self.lock, wanted.lock), ("sources", self.sources, wanted.sources))
        return tuple(what for what, mine, now in pairs if mine != now)
