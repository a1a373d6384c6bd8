"""Finds agents and resources servers by path: they are never imported by name, and each gets a module of its own."""

import hashlib
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal, TypeVar

from prorl_gym.errors import ConfigError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_lock = threading.Lock()


def load_class(
    roots: Sequence[Path], kind: Literal["agents", "resources_servers"], type_name: str, entrypoint: str, base: type[T]
) -> tuple[type[T], Path]:
    """Load the one subclass of `base` that `ROOT/kind/type_name/entrypoint` defines; the first root that has it wins.

    The file is loaded once per process and may import its neighbours relatively (`from .boxed import ...`).

    Returns:
        The class and the folder its code lies in.

    Raises:
        ConfigError: No such file, it does not import, or it defines no such class or several; names file and fix.
    """
    path = _find(roots, kind, type_name, entrypoint)
    module = _load(path, kind, type_name)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    concrete = [cls for cls in found if not inspect.isabstract(cls)]
    if len(concrete) == 1:
        return concrete[0], path.parent
    if concrete:
        names = ", ".join(cls.__name__ for cls in concrete)
        raise ConfigError(f"{path} defines several {base.__name__} classes ({names}); leave one, move the others")
    if found:
        missing = ", ".join(sorted(getattr(found[0], "__abstractmethods__", ())))
        raise ConfigError(f"{path}: {found[0].__name__} does not define {missing}")
    raise ConfigError(f"{path} defines no subclass of {base.__module__}.{base.__name__}")


def _find(roots: Sequence[Path], kind: str, type_name: str, entrypoint: str) -> Path:
    file = PurePosixPath(entrypoint)
    if not _NAME.fullmatch(type_name) or file.is_absolute() or ".." in file.parts or file.suffix != ".py":
        raise ConfigError(
            f"{kind}: {type_name!r} with entrypoint {entrypoint!r}: wants a folder name and a relative .py file in it"
        )
    candidates = [root / kind / type_name / entrypoint for root in roots]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = ", ".join(str(c) for c in candidates) or "nowhere: there are no search roots"
    raise ConfigError(f"{kind}: no {type_name}/{entrypoint}; looked at {looked} (PRORL_GYM_ROOTS adds roots)")


def _load(path: Path, kind: str, type_name: str) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"prorl_gym_{kind}_{re.sub(r'[^A-Za-z0-9_]', '_', type_name)}_{digest}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} is no Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(f"{path} does not import: {type(error).__name__}: {error}") from error
        return module
