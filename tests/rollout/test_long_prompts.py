"""Rows of megabytes: they end their own job, and hold up no other."""

import asyncio
import time

import pytest

from prorl_gym.config.models import PolicyConfig
from prorl_gym.rollout.loop import run_loop
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.tokens.loading import load_renderer
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.types import StopReason

from .kit import episode_on


async def _worst_gap(done: asyncio.Event) -> float:
    worst, before = 0.0, time.monotonic()
    while not done.is_set():
        await asyncio.sleep(0.002)
        worst, before = max(worst, time.monotonic() - before), time.monotonic()
    return worst


@pytest.mark.parametrize("told", [True, False], ids=["context known", "context unknown"])
async def test_a_long_prompt_is_rendered_beside_the_event_loop(scripted_model: str, told: bool) -> None:
    renderer = await asyncio.to_thread(load_renderer, PolicyConfig(), scripted_model)
    row = [ChatMessage("user", "hello world " * 100_000)]
    async with ScriptedLlm(Reply(text="ok"), max_model_len=32768 if told else 2_000_000) as llm, episode_on(llm) as e:
        e.renderer = renderer
        done = asyncio.Event()
        gap = asyncio.create_task(_worst_gap(done))
        began = time.monotonic()
        stop = await run_loop(e, row)
        took = time.monotonic() - began
        done.set()
        assert await gap < took / 2
    assert stop == (StopReason.CONTEXT_EXHAUSTED if told else StopReason.ANSWERED)
    assert len(llm.requests) == (not told)


async def test_what_fits_no_context_is_not_even_rendered() -> None:
    async with ScriptedLlm(Reply(text="ok"), max_model_len=1000) as llm, episode_on(llm) as episode:
        episode.renderer = None  # type: ignore[assignment] - nothing may ask it
        assert await run_loop(episode, [ChatMessage("user", "x" * 100_000)]) is StopReason.CONTEXT_EXHAUSTED
        assert episode.recorder.messages()[0]["content"] == "x" * 100_000
