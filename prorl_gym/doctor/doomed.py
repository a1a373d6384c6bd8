"""A service that will be killed: `python -m prorl_gym.doctor.doomed` starts sandboxes and waits for its end.

Reads a JSON object from its first line of input (`runtime`, `paths`, `spec`, `sandboxes`), answers with a line once the
sandboxes run and hold processes that ignore polite signals, and ends in order when its input ends.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.doctor import inside
from prorl_gym.doctor.subject import ask
from prorl_gym.runtimes.base import Limits, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

LEFT = 2
"""Processes that each sandbox's agent leaves."""


async def main(order: dict[str, Any]) -> None:
    """Do as ordered, until the input ends."""
    runtime, paths = RuntimeConfig.model_validate(order["runtime"]), PathsConfig.model_validate(order["paths"])
    factory = RuntimeFactory(runtime, paths)
    spec = SandboxSpec(**{**order["spec"], "limits": Limits(**order["spec"]["limits"])})
    try:
        await factory.prepare([spec.kind])
        async with AsyncExitStack() as stack:
            for _ in range(order["sandboxes"]):
                sandbox = await stack.enter_async_context(factory.create(spec))
                await ask(sandbox, inside.leaves_processes, LEFT)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)
    finally:
        await factory.stop()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))
