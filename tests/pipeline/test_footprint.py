"""What a kept result costs: the estimate against what the interpreter really allocates."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.pipeline import Outcome
from prorl_gym.pipeline.footprint import LOOKS, footprint, value_bytes
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, ToolRequest, VersionSpan
from prorl_gym.types import StopReason

from .conftest import Serve
from .kit import Quick, ended, request_of

NESTED = json.dumps({"tests": [{"in": str(n), "out": [n, n + 0.5, str(n) * 20]} for n in range(10_000)]})


class Talker(Quick):
    """Records as many turns as the row says, and leaves what it says."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        prompt = list(range(50_000, 50_300))
        new = ((0, 300),)
        job.recorder.add_messages([ChatMessage("user", "q" * 900)])
        for turn in range(job.request.instance["turns"]):
            output = [60_000 + n for n in range(200)]
            generation = Generation(output, [-0.1 * n for n in output], "stop", (VersionSpan(0, 200, 3),), "http://e")
            call = ToolRequest(f"call_{turn}_0", "bash", {"command": "x" * (200 + turn)})
            said = ChatMessage("assistant", "t" * (800 + turn), tool_requests=(call,))
            job.recorder.add_call(Rendered(list(prompt), new), generation, Parsed(said, complete=True))
            job.recorder.add_messages([ChatMessage("tool", "o" * (400 + turn), tool_call_id=call.id)])
            start = len(prompt) + 200
            prompt += [*output, *range(70_000, 70_100)]
            new = ((start, start + 100),)
        artifacts = {"log": "l" * job.request.instance["log"]}
        return RunOutput(StopReason.ANSWERED, answer="42", artifacts=artifacts)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(1.0, resolved=True)


@pytest.mark.parametrize(
    "row",
    [
        {"turns": 0, "log": 0},
        {"turns": 1, "log": 1_000},
        {"turns": 15, "log": 0},
        {"turns": 2, "log": 1_000_000},
        {"turns": 1, "log": 0, "nested": NESTED},
    ],
    ids=["nothing", "short", "long", "artifact", "row"],
)
async def test_the_estimate_is_what_a_finished_job_costs_within_a_factor_of_two(serve: Serve, row: dict[str, Any]):
    pipeline = await serve(Talker())

    async def one(number: int) -> Outcome:
        instance = {name: json.loads(value) if name == "nested" else value for name, value in row.items()}
        return await ended(pipeline.submit(request_of(job_id=str(number), instance=instance)))

    await one(-1)
    count = 3 if "nested" in row else 8
    real = 0
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        estimated = sum([footprint(await one(number)) for number in range(count)])
        gc.collect()
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert real / 2 < estimated < real * 2, (real // count, estimated // count)


async def test_finished_jobs_leave_when_they_cost_too_much(serve: Serve):
    pipeline = await serve(Talker(), results={"max_bytes": 5_000_000})
    for number in range(10):
        await ended(pipeline.submit(request_of(job_id=str(number), instance={"turns": 1, "log": 1_000_000})))
    kept = [number for number in range(10) if pipeline.cancel(job_ids=[str(number)]).already_ended]
    assert kept == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[[[0] * 60 for _ in range(60)] for _ in range(60)] for _ in range(10)],
        lambda: list(range(2_000_000)),
        lambda: {str(number): [number] * 10 for number in range(100_000)},
    ],
    ids=["deep", "long", "wide"],
)
def test_few_elements_of_a_large_value_are_looked_at(make: Callable[[], Any]):
    value = make()
    looked_at = 0

    class Counting(list[Any]):
        def __iter__(self):
            nonlocal looked_at
            for element in super().__iter__():
                looked_at += 1
                yield element

    def counting(inner: Any) -> Any:
        return Counting(map(counting, inner)) if isinstance(inner, list) else inner

    watched = counting(value) if isinstance(value, list) else {key: counting(each) for key, each in value.items()}
    value_bytes(watched)
    assert looked_at <= 4 * LOOKS


def test_a_value_that_holds_itself_has_a_size():
    loop: list[Any] = ["x" * 100]
    loop.append(loop)
    assert value_bytes(loop) > 100
