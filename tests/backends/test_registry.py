"""Several policies in one service."""

from __future__ import annotations

import pytest

from prorl_gym.backends.registry import BackendRegistry
from prorl_gym.config.models import BackendConfig
from prorl_gym.errors import ConfigError
from prorl_gym.testing import Reply, ScriptedLlm

from .conftest import PARAMS, PROMPT, Waits


async def test_configured_addresses_are_registered_in_order_the_dead_ones_too() -> None:
    async with ScriptedLlm(Reply()) as dead:
        pass
    async with ScriptedLlm(Reply()) as llm:
        registry = BackendRegistry(BackendConfig(addresses=(dead.address, llm.address + "/v1")))
        await registry.start()
        assert [(server.address, server.healthy) for server in registry.servers()] == [
            (dead.address, False),
            (llm.address, True),
        ]
        await registry.stop()
        await registry.stop()


async def test_a_wrong_address_in_the_configuration_is_a_config_error() -> None:
    registry = BackendRegistry(BackendConfig(addresses=("n1:8000",)))
    with pytest.raises(ConfigError, match=r"backend\.address"):
        await registry.start()
    await registry.stop()


async def test_policies_do_not_touch_each_other(waits: Waits) -> None:
    registry = BackendRegistry(BackendConfig(wait_s=0.1))
    async with ScriptedLlm(Reply(text="ok")) as mine, ScriptedLlm(Reply(text="ok")) as theirs:
        await registry.pool("mine").add(mine.address)
        await registry.pool("theirs").add(theirs.address)
        async with registry.pool("mine").session("job", waits) as session:
            await registry.pool("theirs").clear("abort")
            assert (await session.generate(PROMPT, PARAMS)).backend == mine.address
        assert [(server.address, server.policy) for server in registry.servers()] == [(mine.address, "mine")]
        assert registry.pool("mine") is registry.pool("mine")
        assert registry.calls_in_flight == 0
    await registry.stop()
