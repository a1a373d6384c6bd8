"""The dialects that exist, by name; `auto` is whichever answers its own probe."""

from collections.abc import Callable

from prorl_gym.backends.base import BackendFacts, Dialect
from prorl_gym.backends.dialects.vllm import VllmDialect
from prorl_gym.backends.transport import Endpoint
from prorl_gym.errors import BackendError, RequestError

DIALECTS: dict[str, Callable[[Endpoint, str | None], Dialect]] = {"vllm": VllmDialect}


def candidates(name: str, endpoint: Endpoint, model: str | None) -> list[Dialect]:
    """The dialects to try at an endpoint, in order: the named one, or all for `auto`.

    Raises:
        RequestError: No dialect has that name; field `dialect`.
    """
    if name == "auto":
        return [make(endpoint, model) for make in DIALECTS.values()]
    if name not in DIALECTS:
        raise RequestError(f"no dialect {name!r}; known: auto, {', '.join(sorted(DIALECTS))}", field="dialect")
    return [DIALECTS[name](endpoint, model)]


async def detect(dialects: list[Dialect]) -> tuple[Dialect, BackendFacts]:
    """The first dialect that the engine answers in, and what it said.

    Raises:
        BackendError: It answers in none; says for each why not.
    """
    reasons: list[str] = []
    for dialect in dialects:
        try:
            return dialect, await dialect.probe()
        except BackendError as error:
            reasons.append(f"{dialect.name}: {error}")
    raise BackendError("; ".join(reasons))
