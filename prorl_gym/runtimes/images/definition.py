"""Definitions: Apptainer's build recipes as Jinja2 templates, kept as data beside the environments that need them.

`{agents,resources_servers}/TYPE/images/NAME.def.j2` is the definition `TYPE/NAME`; `NAME.yaml` beside it may say where
it starts from and what it depends on (`DefinitionSettings`). A task family adds a definition by adding the files.

The invariant: a value lands in a definition as exactly one shell word (a list as one word per item), whatever it holds.
It can neither end a section, nor open `%setup`, which runs on the host, nor be taken for one of Apptainer's own
`{{ build arguments }}`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, Undefined
from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.config.suggest import did_you_mean, render_errors
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.images.source import ImageSource

SUFFIX = ".def.j2"
_KINDS = ("agents", "resources_servers")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@,+-]+")
"""What stands unquoted; no `%`, which opens a section at the start of a line and is a plain character to a shell."""


class DefinitionSettings(BaseModel):
    """`NAME.yaml` beside a definition. File names are relative to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str | None = None
    """Where the image starts from; the template writes it as `{{ base }}`. `images.bases` replaces it."""
    lock: str | None = None
    """The environment's lock file; with `images.mode=lock` a change of it rebuilds the image."""
    sources: tuple[str, ...] = ()
    """Other files that the template copies in; a change is reported, and rebuilt by `images.mode=scratch`."""
    values: dict[str, Any] = {}
    """Values for the template; `images.values` is laid over them."""
    mode: Literal["scratch", "versioned", "lock"] | None = None
    """In place of `images.mode`."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One definition as found.

    Attributes:
        name: `TYPE/NAME`.
        template: The `.def.j2` file.
        settings: From the `.yaml` beside it.
    """

    name: str
    template: Path
    settings: DefinitionSettings

    @property
    def folder(self) -> Path:
        """What its relative file names start from, `%files` included."""
        return self.template.parent

    def render(self, base: ImageSource | None, values: Mapping[str, Any], framework_version: str) -> str:
        """The definition's text.

        Raises:
            ConfigError: The template is wrong or lacks a value; names file and value.
        """
        environment = Environment(  # noqa: S701 - values are quoted for the shell, this is no HTML
            loader=FileSystemLoader(self.folder),
            undefined=StrictUndefined,
            finalize=_quoted,
            keep_trailing_newline=True,
        )
        known: dict[str, Any] = {**values, "framework_version": framework_version}
        if base is not None:
            known["base"] = _Header(base.header())
        try:
            return environment.get_template(self.template.name).render(known)
        except TemplateError as error:
            where = getattr(error, "lineno", None)
            line = f", line {where}" if where else ""
            raise ConfigError(f"{self.template}{line}: {error.message or type(error).__name__}") from None
        except (_Unquotable, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.template}: {error}") from None

    def lock_digest(self) -> str | None:
        """Of the lock file's bytes; None when the definition has none.

        Raises:
            ConfigError: It is named and missing.
        """
        return None if self.settings.lock is None else self._digest([self.settings.lock])

    def sources_digest(self) -> str | None:
        """Of the bytes and names of `sources`; None when there are none.

        Raises:
            ConfigError: One is missing.
        """
        return self._digest(self.settings.sources) if self.settings.sources else None

    def _digest(self, names: Sequence[str]) -> str:
        digest = hashlib.sha256()
        try:
            for name in names:
                path = self.folder / name
                for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                    content = hashlib.sha256(file.read_bytes()).hexdigest()
                    digest.update(f"{name}\0{file.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
        except OSError as error:
            raise ConfigError(f"definition {self.name}: {error}") from None
        return digest.hexdigest()


def find_definitions(roots: Sequence[Path]) -> dict[str, Definition]:
    """All definitions below the search roots by name; the first root that has one wins.

    Raises:
        ConfigError: A `.yaml` is wrong, or an agent and a resources server claim the same name.
    """
    found: dict[str, Path] = {}
    for root in roots:
        of_root: dict[str, Path] = {}
        for name, path in _templates(root):
            if name in of_root:
                raise ConfigError(f"two definitions are called {name}: {of_root[name]} and {path}; rename one")
            of_root[name] = path
        found = {**of_root, **found}
    return {name: Definition(name, path, _settings(path)) for name, path in sorted(found.items())}


def find_definition(roots: Sequence[Path], name: str) -> Definition:
    """The definition of that name.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    definitions = find_definitions(roots)
    if name not in definitions:
        raise ConfigError(f"no image definition {name!r}{did_you_mean(name, definitions)}")
    return definitions[name]


def _templates(root: Path) -> Iterator[tuple[str, Path]]:
    for kind in _KINDS:
        for path in sorted((root / kind).glob(f"*/images/*{SUFFIX}")):
            yield f"{path.parent.parent.name}/{path.name.removesuffix(SUFFIX)}", path


def _settings(template: Path) -> DefinitionSettings:
    path = template.with_name(template.name.removesuffix(SUFFIX) + ".yaml")
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return DefinitionSettings()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return DefinitionSettings.model_validate(content or {})
    except ValidationError as error:
        raise ConfigError(f"{path}: {render_errors(error, DefinitionSettings)}") from None


class _Header(str):
    """Text that is a definition's own, not a value: only a checked source's header."""

    __slots__ = ()


class _Unquotable(ValueError):
    """A value that no shell word can hold in a definition."""


def _quoted(value: object) -> object:
    if isinstance(value, _Header | Undefined):
        return value  # an undefined name raises by itself when it is written, and says which
    if isinstance(value, list | tuple):
        return " ".join(str(_quoted(item)) for item in value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _Unquotable(f"a value must be a text, a number or a list of them, not {value!r}")
    text = str(value)
    if not text.isprintable():
        raise _Unquotable(f"{text[:80]!r} has a line break or a control character; copy a file in by %files instead")
    if _PLAIN.fullmatch(text):
        return text
    return re.sub(r"\{(?=\{)", "{''", "'" + text.replace("'", "'\"'\"'") + "'")
