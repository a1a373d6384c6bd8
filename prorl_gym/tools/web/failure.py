"""Why a search or a page gave nothing. The model is told; it is never the same as finding nothing."""

from typing import Literal

FailureKind = Literal[
    "bad_address",
    "bad_request",
    "refused",
    "unreachable",
    "timeout",
    "rate_limit",
    "captcha",
    "http",
    "unreadable",
    "provider",
]


class WebFailure(Exception):
    """A call that did not do what it says; becomes an observation.

    Attributes:
        kind: One word for it, for events and statistics.
        retry_after_s: Set when another attempt may do better: how long to wait first; 0.0 when nothing is known.
    """

    def __init__(self, message: str, kind: FailureKind, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.retry_after_s = retry_after_s


def seconds_asked(retry_after: str) -> float:
    """What a `Retry-After` header asks one to wait; 0.0 when it says nothing, or a date."""
    asked = retry_after.strip()
    return float(asked) if asked.isascii() and asked.isdigit() and len(asked) <= 6 else 0.0
