"""Where `conf/`, `agents/` and `resources_servers/` are looked for.

The invariant: the bundle is always the last root, and the primary configuration comes from it alone. The roots
before it only add or shadow options.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import ConfigError

ROOTS_VARIABLE = "PRORL_GYM_ROOTS"
MARKER = "prorl_gym_root"
"""A file of this name makes the working directory a root."""


@dataclass(frozen=True, slots=True)
class Root:
    """One search root and who named it."""

    path: Path
    origin: str

    @property
    def conf(self) -> Path:
        """Its Hydra tree, which need not exist."""
        return self.path / "conf"


def bundle() -> Path:
    """The folder that holds what this package ships: the checkout of an editable install, else a wheel's own copy.

    Raises:
        ConfigError: The installation lacks both.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_bundled", package.parent):
        if (candidate / "conf" / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"this installation of prorl_gym has no conf/config.yaml, neither in {package}/_bundled nor beside"
    )


def search_roots(environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> tuple[Root, ...]:
    """The roots in the order they are searched, each folder once.

    Raises:
        ConfigError: `PRORL_GYM_ROOTS` names something that is not a folder.
    """
    here = (cwd or Path.cwd()).resolve()
    found: dict[Path, Root] = {}
    for entry in filter(None, environ.get(ROOTS_VARIABLE, "").split(os.pathsep)):
        path = (here / Path(entry).expanduser()).resolve()
        if not path.is_dir():
            raise ConfigError(f"{ROOTS_VARIABLE}: {entry!r} is not a folder (looked for {path})")
        found.setdefault(path, Root(path, ROOTS_VARIABLE))
    if (here / MARKER).is_file():
        found.setdefault(here, Root(here, "working directory"))
    found.setdefault(bundle(), Root(bundle(), "bundle"))
    return tuple(found.values())


def known_folders(roots: tuple[Root, ...], kind: str) -> list[str]:
    """Names of the folders under `kind` (`agents`, `resources_servers`) of all roots, sorted."""
    return sorted(
        {
            folder.name
            for root in roots
            if (root.path / kind).is_dir()
            for folder in (root.path / kind).iterdir()
            if folder.is_dir() and not folder.name.startswith((".", "_"))
        }
    )
