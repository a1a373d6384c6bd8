"""What is examined: sandboxes of one kind, and how questions are put inside them."""

import dataclasses
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prorl_gym.config.models import ProrlConfig
from prorl_gym.doctor import inside
from prorl_gym.errors import SandboxError
from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

T = TypeVar("T")

_SOURCE = inspect.getsource(inside)
_ANSWER = "prorl_gym doctor: "
CALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Subject:
    """One kind of sandbox as it is configured; the limits of a check are its own.

    Attributes:
        spec: Image and flags.
        factory: Has proven the kind.
        config: The whole service's.
    """

    spec: SandboxSpec
    factory: RuntimeFactory
    config: ProrlConfig

    def sandbox(self, **changes: Any) -> Runtime:
        """One that has not been started; `changes` are fields of its spec."""
        return self.factory.create(dataclasses.replace(self.spec, **changes))

    def state_folders(self) -> list[str]:
        """Where the service keeps what no sandbox may see."""
        places = (self.config.paths.state.resolve(), Path(f"/var/tmp/prorl_gym-{os.geteuid()}"))  # noqa: S108
        return [str(place / name) for place in places for name in ("", "records", "sandboxes")]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Two sandboxes of one service at once.

    Attributes:
        separate: Whether the second has processes of its own alone; else nothing dangerous is tried in it.
        marker: Stands in the environment of the first and of nothing else.
        host_marker: Stands in the service's own environment.
    """

    subject: Subject
    first: Runtime
    second: Runtime
    separate: bool
    marker: str
    host_marker: str


async def ask(runtime: Runtime, question: Callable[..., T], *arguments: object) -> T:
    """Run a function of `inside` inside, and get what it returns.

    Raises:
        SandboxError: It did not answer.
    """
    call = f"{question.__name__}(*json.loads({json.dumps(arguments)!r}))"
    code = f"{_SOURCE}\nimport json\nprint({_ANSWER!r} + json.dumps({call}))"
    reply = await runtime.call("ipython", {"code": code}, timeout_s=CALL_S)
    for line in reply.text.splitlines():
        if line.startswith(_ANSWER):
            answer: T = json.loads(line.removeprefix(_ANSWER))
            return answer
    raise SandboxError(f"a question inside was not answered: {reply.text.strip()[-300:] or 'no output'}")


def own_pid_namespace() -> str:
    """Of this process, as `inside.pid_namespace` would say it."""
    return str(Path("/proc/self/ns/pid").readlink())
