"""What a check found out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        name: What was looked at.
        status: `note` is something that this host or kind of sandbox does not do, and says so itself; `failed` is a
            promise that does not hold.
        detail: What was found, in words.
        fix: What to do about it; every failure has one.
        figures: What was measured, by name with unit.
        area: `host`, `model` or a kind of sandbox.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    area: str = ""


def ok(name: str, detail: str, **figures: float) -> Finding:
    """It holds."""
    return Finding(name, "ok", detail, figures=figures)


def note(name: str, detail: str, fix: str | None = None) -> Finding:
    """It does not hold, and nothing promised it."""
    return Finding(name, "note", detail, fix)


def failed(name: str, detail: str, fix: str) -> Finding:
    """It should hold and does not."""
    return Finding(name, "failed", detail, fix)
