"""A job's way through the stages, and what its result says of it."""

import asyncio
import gc
import json
from typing import Any

import pytest

from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.types import JobResult, JobStatus, StopReason

from .kit import Live, Quick, Sandbox, Staged, ended, idle, record_turn, request_of, until


async def test_a_job_ends_with_reward_tokens_and_times(serve):
    class Recording(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            record_turn(job)
            return RunOutput(StopReason.SUBMITTED, git_patch="diff", artifacts={"out.txt": b"hi", "raw": b"\xff"})

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            job.warn("close call")
            return EvalOutput(0.5, resolved=False, components={"half": 0.5})

    pipeline = await serve(Recording())
    row = {"instance_id": "row-1", "trajectory_id": 4, "unknown": None}
    ticket = pipeline.submit(request_of(instance=row, group_id="g", sampling_params={"model": "x", "api_key": "y"}))
    outcome = await ended(ticket)
    result = JobResult.model_validate(outcome.result())
    assert (result.status, result.stop_reason, result.success) == (JobStatus.COMPLETED, StopReason.SUBMITTED, True)
    assert (result.reward, result.resolved, result.reward_components) == (0.5, False, {"half": 0.5})
    assert (result.instance_id, result.trajectory_id, result.group_id, result.task) == ("row-1", 4, "g", "t")
    assert (result.mask_sample, result.filter, result.failure, result.error) == (False, False, None, None)
    assert (result.finish, result.end_properly, result.critical_error) == (True, True, None)
    assert (result.git_patch, result.artifacts) == ("diff", {"out.txt": "hi", "raw": {"base64": "/w=="}})
    assert result.segments[0].response_ids == [7, 8]
    assert result.messages[1].input_ids == [1, 2, 3]
    assert (result.policy_versions.min, result.policy_versions.max) == (3, 3)
    assert result.warnings == ["ignored in sampling_params: api_key, model", "close call"]
    assert result.ledger is None
    assert set(result.timing.queued) == set(result.timing.active) == {"init", "run", "eval"}
    assert len(result.provenance["config_digest"]) == 64
    assert idle(pipeline)


@pytest.mark.parametrize(
    ("include", "present", "token_ids"),
    [
        (None, {"messages", "segments", "artifacts"}, True),
        ((), set(), None),
        (("segments",), {"segments"}, None),
        (("messages",), {"messages"}, False),
        (("token_ids",), {"messages"}, True),
        (("ledger",), {"ledger"}, None),
    ],
)
async def test_include_chooses_the_heavy_parts(serve, include, present, token_ids):
    handler = Staged()
    outcome = await ended((await serve(handler)).submit(request_of()))
    result = outcome.result(include)
    assert result.keys() & {"messages", "segments", "artifacts", "ledger"} == present
    if token_ids is not None:
        assert ("token_ids" in result["messages"][1]) is token_ids
    JobResult.model_validate(result)


async def test_the_ledger_comes_when_the_request_asked_for_it(serve):
    outcome = await ended((await serve(Staged())).submit(request_of(return_ledger=True)))
    assert outcome.result()["ledger"][0]["output_ids"] == [7, 8]
    assert outcome.result(["segments"])["ledger"]


async def test_init_and_run_resources_are_stopped_before_eval_and_evals_own_after_it(serve):
    live, seen = Live(), []

    class Sandboxed(Quick):
        async def init(self, job: Job) -> Prepared:
            job.adopt(Sandbox(live))
            runtime = Sandbox(live)
            job.adopt(runtime)
            return Prepared(runtime, metadata="from init")

        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            seen.append((prepared.metadata, live.now))
            job.adopt(Sandbox(live))
            return RunOutput(StopReason.ANSWERED, metadata="from run")

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            seen.append((run_output.metadata, live.now))
            job.adopt(Sandbox(live))
            return EvalOutput(1.0)

    await ended((await serve(Sandboxed())).submit(request_of()))
    assert seen == [("from init", 2), ("from run", 0)]
    assert (live.now, live.most) == (0, 3)


@pytest.mark.parametrize("end", ["well", "init", "run", "cancel"])
async def test_what_is_adopted_until_the_jobs_end_outlives_every_stage_and_nothing_else(serve, end):
    live, seen = Live(), []

    class Sessioned(Staged):
        async def init(self, job: Job) -> Prepared:
            job.adopt(Sandbox(live), until="end")
            if end == "init":
                raise ValueError
            return await super().init(job)

        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            if end == "run":
                raise ValueError
            return await super().run(job, prepared)

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            seen.append(live.now)
            return await super().eval(job, run_output)

        def final_result(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
            seen.append(live.now)
            return result

    handler = Sessioned(*["eval"] * (end == "cancel"))
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(job_id="j"))
    if end == "cancel":
        await handler.inside["eval"].wait()
        pipeline.cancel(job_ids=["j"])
    await ended(ticket)
    await until(lambda: live.now == 0)
    assert seen == {"well": [1, 1], "init": [1], "run": [1, 1], "cancel": [1]}[end]


async def test_what_final_result_rewrites_is_kept_and_what_is_not_its_own_is_not(serve):
    class Rewriting(Quick):
        def final_result(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
            result["reward_components"] = {"from": "the hook"}
            result["provenance"]["image_digest"] = "sha256:1"
            result["artifacts"]["late"] = 3
            result["status"] = "failed"
            result["reward"] = 99.0
            return result

    result = (await ended((await serve(Rewriting())).submit(request_of()))).result()
    assert result["reward_components"] == {"from": "the hook"}
    assert result["provenance"].keys() == {"service_version", "config_digest", "image_digest"}
    assert result["artifacts"] == {"late": 3}
    assert (result["status"], result["reward"]) == ("completed", 1.0)


@pytest.mark.parametrize("wrong", [None, [], {"artifacts": 7}, {"git_patch": 7}])
async def test_a_final_result_that_breaks_costs_a_warning_and_not_the_result(serve, wrong):
    class Breaking(Quick):
        async def final_result(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
            return wrong

    result = (await ended((await serve(Breaking())).submit(request_of()))).result()
    assert (result["status"], result["reward"]) == ("completed", 1.0)
    assert "final_result failed" in result["warnings"][0]


async def test_queue_time_does_not_count(serve):
    """L-15: one RUN slot, a budget below the time in the queue."""

    class Slow(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            await asyncio.sleep(0.15)
            return await super().run(job, prepared)

    pipeline = await serve(Slow(), pools=(4, 1, 4))
    tickets = [pipeline.submit(request_of(timeout_s=0.3)) for _ in range(4)]
    results = [(await ended(ticket)).result() for ticket in tickets]
    assert [result["status"] for result in results] == ["completed"] * 4
    assert max(sum(result["timing"]["queued"].values()) for result in results) > 0.4
    assert all(result["timing"]["counted_elapsed"] < 0.3 for result in results)


async def test_higher_priority_goes_first(serve):
    order: list[str] = []

    class Noting(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            order.append(job.id)
            await asyncio.sleep(0.01)
            return await super().run(job, prepared)

    pipeline = await serve(Noting(), pools=(1, 1, 1), ready_ahead=1)
    jobs = [("first", 0), ("a", 0), ("whenever", -5), ("b", 0), ("urgent", 5)]
    tickets = [pipeline.submit(request_of(job_id=name, priority=priority)) for name, priority in jobs]
    for ticket in tickets:
        await ended(ticket)
    assert order == ["first", "urgent", "a", "b", "whenever"]


async def test_480_quick_inits_before_slow_runs_start_no_more_sandboxes_than_the_bound(serve):
    live = Live()

    class Slow(Quick):
        async def init(self, job: Job) -> Prepared:
            runtime = Sandbox(live)
            job.adopt(runtime)
            await asyncio.sleep(0)
            return Prepared(runtime)

        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            await asyncio.sleep(0.02)
            return await super().run(job, prepared)

    pipeline = await serve(Slow(), pools=(64, 16, 8), ready_ahead=20)
    tickets = [pipeline.submit(request_of()) for _ in range(480)]
    for ticket in tickets:
        assert (await ended(ticket)).status is JobStatus.COMPLETED
    assert 16 < live.most <= 20 + 16
    assert live.now == 0
    assert idle(pipeline)


async def test_the_three_stages_overlap(serve):
    handler = Staged("eval")
    pipeline = await serve(handler, pools=(1, 1, 1))
    tickets = [pipeline.submit(request_of())]
    await handler.inside["eval"].wait()
    for stage in ("run", "init"):
        handler.go[stage].clear()
        handler.inside[stage].clear()
        tickets.append(pipeline.submit(request_of()))
        await handler.inside[stage].wait()
    now = pipeline.snapshot()
    assert (now.active_init, now.active_run, now.active_eval) == (1, 1, 1)
    for stage in ("init", "run", "eval"):
        handler.go[stage].set()
    for ticket in tickets:
        assert (await ended(ticket)).status is JobStatus.COMPLETED


async def test_pools_are_resized_while_jobs_run(serve):
    handler = Staged("run")
    pipeline = await serve(handler, pools=(8, 1, 1))
    tickets = [pipeline.submit(request_of()) for _ in range(4)]
    await handler.inside["run"].wait()
    await until(lambda: pipeline.snapshot().run_queue == 1)
    pipeline.resize(run=3)
    await until(lambda: pipeline.snapshot().active_run == 3)
    assert pipeline.snapshot().pools["run"]["workers"] == 3
    assert pipeline.snapshot().pools["ready_ahead"]["limit"] == 3
    handler.go["run"].set()
    for ticket in tickets:
        await ended(ticket)


async def test_a_job_is_not_lost_to_the_garbage_collector(serve):
    """L-17: nobody holds the tickets."""
    collected = asyncio.Event()

    class Waiting(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            await asyncio.sleep(0.05)
            return await super().run(job, prepared)

    pipeline = await serve(Waiting(), pools=(50, 50, 50))

    async def collect() -> None:
        while not collected.is_set():
            gc.collect()
            await asyncio.sleep(0.01)

    collector = asyncio.create_task(collect())
    names = [pipeline.submit(request_of()).id for _ in range(200)]
    for name in names:
        assert (await ended(pipeline.get(name))).status is JobStatus.COMPLETED
    collected.set()
    await collector


async def test_events_tell_the_whole_story_to_who_comes_late_and_to_who_follows(serve):
    handler = Staged("run")

    class Telling(Staged):
        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            job.emit("scored", detail=float("nan"))
            return await super().eval(job, run_output)

    handler = Telling("run")
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of())
    await handler.inside["run"].wait()
    assert [event.name for event in ticket.events.since()] == ["queued", "init", "run"]

    async def follow() -> list[str]:
        return [event.name async for event in ticket.events.follow(2)]

    follower = asyncio.create_task(follow())
    await asyncio.sleep(0)
    handler.go["run"].set()
    await ended(ticket)
    assert await follower == ["run", "eval", "scored", "completed"]
    assert [event.name async for event in ticket.events.follow()][-1] == "completed"


async def test_partial_messages_show_the_turns_so_far_without_ids(serve):
    handler = Staged("run")
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of())
    assert ticket.partial_messages() == []
    await handler.inside["run"].wait()
    assert ticket.status is JobStatus.RUN
    messages = ticket.partial_messages()
    assert [message["content"] for message in messages] == ["question", "thinking aloud"]
    assert "token_ids" not in messages[1]
    handler.go["run"].set()
    await ended(ticket)
    assert ticket.partial_messages() == messages


async def test_nothing_that_a_handler_puts_into_a_result_breaks_its_json(serve):
    class Unruly(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            record_turn(job, text="nul \x00 here")
            job.warn("lone \ud800 surrogate")
            return RunOutput(StopReason.ANSWERED, git_patch="\udfff")

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            endless: list[Any] = []
            endless.append(endless)
            return EvalOutput(
                1.0,
                components={
                    "nan": float("nan"),
                    "inf": [float("inf")],
                    "\ud800": {1, 2},
                    "big": 1 << 70,
                    "me": endless,
                },
            )

    ticket = (await serve(Unruly())).submit(request_of(instance={"instance_id": "\ud800"}))
    result = (await ended(ticket)).result()
    json.dumps(result, allow_nan=False).encode()
    assert result["reward_components"]["nan"] is None
    assert result["reward_components"]["\ufffd"] == [1, 2]
    assert result["warnings"] == ["lone \ufffd surrogate"]
    assert result["messages"][1]["content"] == "nul \x00 here"
