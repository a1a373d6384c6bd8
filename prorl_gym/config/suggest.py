"""Turns what is wrong with a configuration into words that name the key and the nearest valid one."""

import json
import typing
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

MADE_KEYS = ("environments", "roots")
"""Top-level fields of the configuration that are made from `gym` and the search roots, never set."""

_SHOWN_CHARACTERS = 80


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the nearest known name, else `; known: A, B`."""
    names = sorted(known)
    if guess := nearest(name, names):
        return f"; did you mean {guess}?"
    return f"; known: {', '.join(names)}" if names else ""


def key_defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a model and the models inside it, with its default as it would be written."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = _model_in(field.annotation)
        value = field.get_default(call_default_factory=True)
        if inner is None:
            shown = "" if field.is_required() else json.dumps(value, default=str)
            yield path, shown.strip('"')
        elif isinstance(value, BaseModel):
            for key, default in key_defaults(inner, f"{path}."):
                own = getattr(value, key.removeprefix(f"{path}."), None)
                yield key, default if own is None else json.dumps(own, default=str).strip('"')
        else:
            yield from key_defaults(inner, f"{path}.")


def key_paths(model: type[BaseModel]) -> Iterator[str]:
    """Every dotted key of a model and the models inside it."""
    return (key for key, _ in key_defaults(model))


def render_errors(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """One line per mistake: its dotted key, what is wrong, what would be right.

    Args:
        error: Raised by `model`.
        model: What was validated.
        prefix: Dotted key under which the model stands in the configuration.
    """
    mistakes = error.errors(include_url=False)
    mistyped = {details["loc"][:-1] for details in mistakes if details["type"] == "extra_forbidden"}
    told = [d for d in mistakes if d["type"] != "missing" or d["loc"][:-1] not in mistyped]
    return "\n".join(_render(details, model, prefix) for details in told)


def _render(details: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    parts = [str(part) for part in details["loc"]]
    path = ".".join([prefix, *parts] if prefix else parts)
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key{_nearest_key(parts, model, prefix)}"
    if details["type"] == "missing":
        return f"{path}: this key is required"
    value = details["input"]
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
    wanted = details["msg"].replace("valid tuple", "list").removeprefix("Input should be ")
    message = f"{path}: should be {wanted}, not {shown}" if wanted != details["msg"] else f"{path}: {wanted} ({shown})"
    if details["type"] == "tuple_type" and isinstance(value, str):
        message += f"; write a list: '{path}=[\"{value}\"]'"
    return message


def _nearest_key(parts: list[str], model: type[BaseModel], prefix: str) -> str:
    head = f"{prefix}." if prefix else ""
    above, name = parts[:-1], parts[-1]
    parent = _model_at(model, above)
    siblings = list(parent.model_fields) if parent else []
    stem = ".".join(above) + "." if above else ""
    if guess := nearest(name, siblings):
        return f"; did you mean {head}{stem}{guess}?"
    paths = list(key_paths(model))
    leaf = nearest(name, {path.rsplit(".", 1)[-1] for path in paths})
    by_leaf = [path for path in paths if path.rsplit(".", 1)[-1] == leaf]
    if guess := nearest(stem + name, by_leaf) or next(iter(by_leaf), None) or nearest(stem + name, paths):
        return f"; did you mean {head}{guess}?"
    return f"; known here: {', '.join(sibling for sibling in siblings if sibling not in MADE_KEYS)}" if siblings else ""


def _model_at(model: type[BaseModel], parts: list[str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in parts:
        field = current.model_fields.get(part) if current else None
        current = _model_in(field.annotation) if field else None
    return current


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model of a field that holds one model, or one or None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate if typing.get_origin(annotation) is not tuple else None
    return None
