"""One policy's renderer: loaded once, in a thread, for whatever model its backends serve."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig, PolicyConfig
from prorl_gym.errors import BackendError, ConfigError
from prorl_gym.rollout.policy import Policy
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.tokens.base import ChatRenderer

from .kit import RENDERER


class Loads:
    """Stands for `load_renderer`: counts, and refuses while it is told to."""

    def __init__(self, refuse: bool = False) -> None:
        self.models: list[str] = []
        self.refuse = refuse
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, config: PolicyConfig, model: str) -> ChatRenderer:
        self.models.append(model)
        assert self.may_end.wait(10)
        assert threading.current_thread() is not threading.main_thread()
        if self.refuse:
            raise ConfigError("its template cannot be proven")
        return RENDERER


class Pauses:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    @asynccontextmanager
    async def __call__(self, reason: str) -> AsyncIterator[None]:
        self.reasons.append(reason)
        yield


@pytest.fixture
async def pool() -> AsyncIterator[BackendPool]:
    pool = BackendPool(BackendConfig(), "default")
    await pool.start()
    yield pool
    await pool.stop()


async def add(pool: BackendPool, llm: ScriptedLlm, version: int = 1) -> None:
    await pool.add(llm.address, policy_version=version, dialect=None, model=None, api_key_env=None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_auto_waits_for_the_first_backend_with_the_timer_paused(pool: BackendPool) -> None:
    load, pauses = Loads(), Pauses()
    policy = Policy("default", PolicyConfig(), pool, load=load)
    async with ScriptedLlm(Reply(), model="served-model") as llm:
        asked = [asyncio.create_task(policy.renderer(pauses)) for _ in range(20)]
        await until(lambda: bool(pauses.reasons))
        await add(pool, llm)
        assert await asyncio.gather(*asked) == [RENDERER] * 20
        assert await policy.renderer(pauses) is RENDERER
    assert load.models == ["served-model"]
    assert "backend" in pauses.reasons[0]


async def test_a_named_model_needs_no_backend(pool: BackendPool) -> None:
    load = Loads()
    assert await Policy("default", PolicyConfig(model="/m"), pool, load=load).renderer(Pauses()) is RENDERER
    assert load.models == ["/m"]


async def test_a_refusal_stands_until_another_backend_comes(pool: BackendPool) -> None:
    load = Loads(refuse=True)
    policy = Policy("default", PolicyConfig(), pool, load=load)
    async with ScriptedLlm(Reply(), model="m") as llm:
        await add(pool, llm, version=1)
        for _ in range(3):
            with pytest.raises(BackendError, match="'m' is refused: its template cannot be proven") as refused:
                await policy.renderer(Pauses())
            assert refused.value.retryable is False
        assert len(load.models) == 1
        load.refuse = False
        await add(pool, llm, version=2)
        assert await policy.renderer(Pauses()) is RENDERER
    assert len(load.models) == 2


async def test_a_job_that_is_cancelled_leaves_the_load_to_the_others(pool: BackendPool) -> None:
    load = Loads()
    load.may_end.clear()
    policy = Policy("default", PolicyConfig(model="/m"), pool, load=load)
    one, two = (asyncio.create_task(policy.renderer(Pauses())) for _ in range(2))
    await until(lambda: bool(load.models))
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    load.may_end.set()
    assert await two is RENDERER
    assert load.models == ["/m"]


async def test_a_preloaded_renderer_is_there_when_the_first_job_asks(pool: BackendPool) -> None:
    load, pauses = Loads(), Pauses()
    policy = Policy("default", PolicyConfig(), pool, load=load)
    async with ScriptedLlm(Reply(), model="m") as llm:
        await add(pool, llm)
        policy.preload()
        policy.preload()
        await until(lambda: bool(load.models))
        assert await policy.renderer(pauses) is RENDERER
        policy.preload()
        pauses.reasons.clear()
        assert await policy.renderer(pauses) is RENDERER
    assert load.models == ["m"]
    assert pauses.reasons == []
    await policy.stop()


async def test_preloading_waits_as_long_as_the_engine_takes_to_come_up() -> None:
    load = Loads()
    pool = BackendPool(BackendConfig(unhealthy_wait_s=0.05, health_interval_s=0.1), "default")
    policy = Policy("default", PolicyConfig(), pool, load=load)
    async with ScriptedLlm(Reply(), model="m") as llm:
        await llm.stop()
        await add(pool, llm)
        policy.preload()
        with pytest.raises(BackendError, match="healthy"):
            await pool.first_facts(Pauses())
        assert load.models == []
        await llm.start()
        await until(lambda: load.models == ["m"])
    await policy.stop()
    await pool.stop()


async def test_a_refusal_is_logged_once_and_shown_until_other_backends_come(
    pool: BackendPool, caplog: pytest.LogCaptureFixture
) -> None:
    load = Loads(refuse=True)
    policy = Policy("trainer", PolicyConfig(), pool, load=load)
    async with ScriptedLlm(Reply(), model="m") as llm:
        await add(pool, llm)
        assert policy.refusal is None
        policy.preload()
        await until(lambda: policy.refusal is not None)
        for _ in range(3):
            with pytest.raises(BackendError, match="'m' is refused: its template cannot be proven"):
                await policy.renderer(Pauses())
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert errors == ["policy 'trainer': model 'm' is refused: its template cannot be proven"]
        assert policy.refusal == errors[0]
        await add(pool, llm, version=2)
        assert policy.refusal is None
    await policy.stop()


async def test_a_load_that_hangs_holds_up_neither_stop_nor_loop(pool: BackendPool) -> None:
    load = Loads()
    load.may_end.clear()
    policy = Policy("default", PolicyConfig(model="/m"), pool, load=load)
    policy.preload()
    await until(lambda: bool(load.models))
    async with asyncio.timeout(5):
        await policy.stop()
        await asyncio.get_running_loop().shutdown_default_executor()
    load.may_end.set()
