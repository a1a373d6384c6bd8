"""`images`: builds, fetches, lists and prunes the images of sandboxes."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prorl_gym.commands.console import make_console
from prorl_gym.commands.rollout_run import run_interruptibly
from prorl_gym.config.compose import load_config
from prorl_gym.config.models import ProrlConfig
from prorl_gym.config.suggest import did_you_mean
from prorl_gym.errors import ConfigError, ProrlGymError, RequestError
from prorl_gym.handlers.sandbox_spec import row_image
from prorl_gym.runtimes.images import Obtained, RuntimeImageBuilder, StoredImage

_DAY_S = 86_400.0
_DEFAULT_DAYS = 30.0
_HELP = """\
usage: python -m prorl_gym images ACTION [...] [KEY=VALUE ...]

  build [NAME ...]            build definitions (all, without a name) unless an image that counts as the same is there
  show NAME                   print a definition as Apptainer would be given it
  pull ROWS.jsonl ...         fetch what the rows of data sets name, as far as images.allow permits
  pull SOURCE ...             fetch docker://NAME:TAG, oras://HOST/NAME:TAG; pack localimage:/FOLDER
  list [--json]               definitions and images, with sizes and ages
  prune [days=30] [--dry-run] remove images that nobody used for that long, and what dead builds left

A definition is a file {agents,resources_servers}/TYPE/images/NAME.def.j2 of any search root. Useful keys: images.mode
(lock, versioned, scratch), images.format (sif, directory), images.allow, images.bases, images.parallel, paths.images.

  python -m prorl_gym images build tool_calling/python images.mode=scratch
  python -m prorl_gym images pull train.jsonl 'images.allow=["swebench/*"]' paths.images=/shared/images

Exit code: 0 all there, 1 something failed (each failure is named), 2 wrong usage.
"""


def help_text() -> str:
    """How the command is used."""
    return _HELP


def images_command(arguments: list[str]) -> int:
    """Do what the first argument says.

    Raises:
        ConfigError: Unknown action, option or name.
    """
    if not arguments or arguments[0] not in _ACTIONS:
        given = f"unknown action {arguments[0]!r}{did_you_mean(arguments[0], _ACTIONS)}" if arguments else "no action"
        raise ConfigError(f"images: {given}\n{_HELP}")
    action, rest = arguments[0], arguments[1:]
    function, flags = _ACTIONS[action]
    given_flags = {argument for argument in rest if argument.startswith("-")}
    for flag in sorted(given_flags - flags):
        raise ConfigError(f"images {action}: unknown option {flag}{did_you_mean(flag, flags)}")
    return function([argument for argument in rest if argument not in given_flags], given_flags)


@dataclass(slots=True)
class _Outcomes:
    """What became of each image: how many were made, were there, and why others are not."""

    total: int
    made: int = 0
    there: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return self.made + self.there + len(self.failures)


def _build(arguments: list[str], _: set[str]) -> int:
    names, config = _split(arguments)
    definitions = RuntimeImageBuilder(config).definitions()
    for name in names:
        if name not in definitions:
            raise ConfigError(f"no image definition {name!r}{did_you_mean(name, definitions)}")
    wanted = dict.fromkeys(names or definitions)
    return _obtain(config, list(wanted), lambda builder: builder.build, "built", {})


def _pull(arguments: list[str], _: set[str]) -> int:
    names, config = _split(arguments)
    if not names:
        raise ConfigError(f"images pull: name a data set (.jsonl) or a source\n{_HELP}")
    wanted: dict[str, None] = {}
    refused: dict[str, str] = {}
    for name in names:
        if name.endswith(".jsonl"):
            images, problems = row_images(Path(name), config.images.allow)
            wanted |= dict.fromkeys(images)
            refused |= problems
        else:
            wanted[name] = None  # whoever types it is no row
    return _obtain(config, list(wanted), lambda builder: builder.pull, "fetched", refused)


def row_images(file: Path, allowed: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The images that the rows of a data set name, each once, and `FILE:LINE` → why a row's is refused.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON object.
    """
    images: dict[str, None] = {}
    refused: dict[str, str] = {}
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    image = row_image(_row(f"{file}:{number}", line), allowed)
                except RequestError as error:
                    refused[f"{file}:{number}"] = str(error)
                    continue
                if image is not None:
                    images[image] = None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    return list(images), refused


def _row(where: str, line: bytes) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: no JSON object")
    return row


def _obtain(
    config: ProrlConfig,
    wanted: list[str],
    method: Callable[[RuntimeImageBuilder], Callable[[str], Awaitable[Obtained]]],
    verb: str,
    refused: dict[str, str],
) -> int:
    """Make images side by side, a line for each as it is done, and sum up."""
    console = make_console()
    outcomes = _Outcomes(len(wanted))

    async def one(obtain: Callable[[str], Awaitable[Obtained]], name: str) -> None:
        try:
            obtained = await obtain(name)
        except ProrlGymError as error:
            outcomes.failures[name] = str(error)
            line = "failed"
        else:
            outcomes.made += obtained.made
            outcomes.there += not obtained.made
            line = _told(obtained, verb)
        console.print(f"[{outcomes.done}/{outcomes.total}] {name}: {line}", markup=False, soft_wrap=True)

    async def every() -> None:
        obtain = method(RuntimeImageBuilder(config))
        async with asyncio.TaskGroup() as group:
            for name in wanted:
                group.create_task(one(obtain, name))

    if wanted:
        with console.status(f"{len(wanted)} images, {config.images.parallel} at once"):
            run_interruptibly(every())
    failures = {**refused, **outcomes.failures}
    for name, reason in failures.items():
        sys.stderr.write(f"error: {name}: {reason}\n")
    parts = (f"{outcomes.made} {verb}", f"{outcomes.there} there already", f"{len(failures)} failed")
    console.print(", ".join(parts) + f"; images are in {config.paths.images}", soft_wrap=True)
    return 1 if failures else 0


def _told(obtained: Obtained, verb: str) -> str:
    image = obtained.image
    if image is None:
        return f"used where it lies, {obtained.path}"
    if obtained.made:
        return f"{verb} in {image.record.seconds:.1f} s, {_size(image.record.size_bytes)}, {obtained.path}"
    changed = " and ".join(obtained.stale)
    note = f"; {changed} changed since: images.mode=scratch makes it anew" if changed else ""
    return f"there already, {obtained.path}{note}"


def _show(arguments: list[str], _: set[str]) -> int:
    names, config = _split(arguments)
    if len(names) != 1:
        raise ConfigError("images show: name one definition")
    sys.stdout.write(RuntimeImageBuilder(config).render(names[0]))
    return 0


def _list(arguments: list[str], flags: set[str]) -> int:
    names, config = _split(arguments)
    if names:
        raise ConfigError(f"images list: takes no names, not {names[0]!r}")
    builder = RuntimeImageBuilder(config)
    images = builder.store.images()
    missing = sorted(builder.definitions().keys() - {image.record.name for image in images})
    if "--json" in flags:
        rows = [{"path": str(i.path), "used": i.used, **i.record.model_dump(mode="json")} for i in images]
        sys.stdout.write(json.dumps({"images": rows, "not_built": missing}, indent=1) + "\n")
        return 0
    console = make_console()
    console.print(_table(images))
    total = sum(image.record.size_bytes for image in images)
    console.print(f"{len(images)} images, {_size(total)}, in {config.paths.images}", soft_wrap=True)
    if missing:
        console.print(f"definitions not built: {', '.join(missing)}", soft_wrap=True, markup=False)
    return 0


def _table(images: list[StoredImage]) -> Table:
    table = Table("image", "made", "format", "size", "age", "unused for", "digest", "started from", box=None)
    now = time.time()
    for image in images:
        record = image.record
        base = (record.recipe.base or "its definition").partition("#")[0]
        row = (record.name, record.origin, record.recipe.format, _size(record.size_bytes), _age(now - record.created))
        table.add_row(*row, _age(now - image.used), record.digest[:12], base)
    return table


def _prune(arguments: list[str], flags: set[str]) -> int:
    days = [argument for argument in arguments if argument.startswith("days=")]
    names, config = _split([argument for argument in arguments if argument not in days])
    if names or len(days) > 1:
        raise ConfigError(f"images prune: takes days=N and --dry-run\n{_HELP}")
    dry_run = "--dry-run" in flags
    pruned = RuntimeImageBuilder(config).store.prune(unused_s=_days(days) * _DAY_S, dry_run=dry_run)
    console: Console = make_console()
    for each in pruned:
        if each.failure is None:
            verb = "would remove" if dry_run else "removed"
            console.print(f"{verb} {each.path} ({each.what}), {_size(each.size_bytes)}", markup=False, soft_wrap=True)
        else:
            sys.stderr.write(f"error: {each.path}: {each.failure}\n")
    freed = sum(each.size_bytes for each in pruned if each.failure is None)
    console.print(f"{_size(freed)} {'would be ' if dry_run else ''}freed")
    return 1 if any(each.failure for each in pruned) else 0


def _days(given: list[str]) -> float:
    try:
        days = float(given[0].removeprefix("days=")) if given else _DEFAULT_DAYS
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise ConfigError(f"{given[0]}: a number of days, 0 or more")
    return days


def _split(arguments: list[str]) -> tuple[list[str], ProrlConfig]:
    """Names, and the configuration that the overrides make."""
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    return names, load_config([argument for argument in arguments if argument not in names])


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"


def _age(seconds: float) -> str:
    for unit, length_s in (("d", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_ACTIONS: dict[str, tuple[Callable[[list[str], set[str]], int], set[str]]] = {
    "build": (_build, set()),
    "show": (_show, set()),
    "pull": (_pull, set()),
    "list": (_list, {"--json"}),
    "prune": (_prune, {"--dry-run"}),
}
