"""The store, the event log and the JSON seam on their own."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.pipeline.events import KEPT_EVENTS, EventLog
from prorl_gym.pipeline.json_value import json_safe
from prorl_gym.pipeline.store import TicketStore
from prorl_gym.pipeline.ticket import Ticket

from .kit import request_of


def ticket(name: str, group: str | None = None) -> Ticket:
    return Ticket(name, "t", request_of(job_id=name, group_id=group))


def test_the_store_drops_ended_jobs_by_age_and_forgets_their_group():
    now = 0.0
    store = TicketStore(ttl_s=10, max_count=100, max_bytes=1000, clock=lambda: now)
    for name in ("a", "b", "c"):
        store.add(ticket(name, "g"))
    store.ended(store.get("a"), 1)
    now = 5.0
    store.ended(store.get("b"), 1)
    assert store.in_group("g") == ["a", "b", "c"]
    now = 10.0
    assert store.in_group("g") == ["b", "c"]
    now = 1000.0
    assert (store.with_prefix(""), len(store)) == (["c"], 1)
    store.ended(store.get("c"), 1)
    now = 2000.0
    assert store.in_group("g") == []
    assert len(store) == 0


def test_the_store_drops_the_oldest_ended_jobs_by_memory_but_never_the_newest_or_one_under_way():
    store = TicketStore(ttl_s=10, max_count=100, max_bytes=1000, clock=lambda: 0.0)
    for name in ("running", "a", "b", "c", "huge"):
        store.add(ticket(name))
    for name, size in (("a", 400), ("b", 500)):
        store.ended(store.get(name), size)
    assert store.with_prefix("") == ["running", "a", "b", "c", "huge"]
    store.ended(store.get("c"), 200)
    assert store.with_prefix("") == ["running", "b", "c", "huge"]
    store.ended(store.get("huge"), 5000)
    assert store.with_prefix("") == ["running", "huge"]
    store.add(ticket("d"))
    store.ended(store.get("d"), 999)
    assert store.with_prefix("") == ["running", "d"]


async def test_a_full_event_log_forgets_its_oldest_and_its_followers_see_the_gap():
    log = EventLog()
    for number in range(KEPT_EVENTS + 10):
        log.append("turn", {"number": number})
    assert [log.since()[0].seq, log.since()[-1].seq] == [11, KEPT_EVENTS + 10]
    assert len(log.since(KEPT_EVENTS + 5)) == 5
    assert log.since(10_000) == []


async def test_a_slow_follower_neither_holds_the_writer_up_nor_grows_anything():
    log = EventLog()
    log.append("first")
    follower = log.follow()
    assert (await anext(follower)).name == "first"
    for _ in range(3 * KEPT_EVENTS):
        log.append("turn")
    log.append("completed", last=True)
    log.append("too late")
    seen = [event async for event in follower]
    assert len(seen) == KEPT_EVENTS
    assert (seen[0].seq, seen[-1].name) == (2 * KEPT_EVENTS + 3, "completed")


async def test_many_follow_at_once_and_one_who_leaves_is_forgotten():
    log = EventLog()

    async def follow() -> list[str]:
        return [event.name async for event in log.follow()]

    followers = [asyncio.create_task(follow()) for _ in range(5)]
    await asyncio.sleep(0)
    followers[0].cancel()
    await asyncio.sleep(0)
    assert len(log._readers) == 4
    for name in "abc":
        log.append(name, last=name == "c")
        await asyncio.sleep(0)
    assert await asyncio.gather(*followers[1:]) == [["a", "b", "c"]] * 4


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.just(object()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=20,
)


@given(anything)
def test_whatever_comes_in_strict_json_comes_out(value: Any):
    orjson = pytest.importorskip("orjson")
    safe = json_safe(value)
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
    orjson.dumps(safe)


def test_plain_json_passes_unchanged():
    value = {"a": [1, 2.5, None, True, "ü\x00"], "b": {"c": "d"}}
    assert json_safe(value) == value


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError


def test_foreign_objects_are_described_and_arrays_become_lists():
    class Array:
        def tolist(self) -> list[float]:
            return [1.0, float("nan")]

    assert json_safe({"x": Array(), "y": Rude(), "z": {1}}) == {"x": [1.0, None], "y": "<Rude>", "z": [1]}
