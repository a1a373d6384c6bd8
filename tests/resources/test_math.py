"""The math environment: what counts as equal, and what hostile answers cannot do."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prorl_gym.errors import EvaluationError, RequestError
from prorl_gym.resources.base import EpisodeOutcome, ResourcesContext, ResourcesServer, Verdict
from prorl_gym.resources.confine import Confinement
from prorl_gym.resources.graders import GraderPool
from prorl_gym.rollout.loading import load_class
from prorl_gym.runtimes.bubblewrap import bubblewrap_program

ROOT = Path(__file__).parents[2]
CONFINED = Confinement(bubblewrap_program(Path(tempfile.gettempdir(), "prorl_gym-tests")))


def math_server(**config: Any) -> ResourcesServer:
    server_class, _ = load_class([ROOT], "resources_servers", "math", "app.py", ResourcesServer)
    graders = lambda grader, **options: GraderPool(grader, CONFINED, **options)  # noqa: E731
    return server_class(ResourcesContext("math", config, sandbox=None, graders=graders, state_dir=""))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math() -> AsyncIterator[ResourcesServer]:
    server = math_server(workers=1)
    await server.start()
    yield server
    await server.stop()


async def score(server: ResourcesServer, expected: Any, answer: str) -> Verdict:
    outcome = EpisodeOutcome(answer=answer, messages=[], artifacts={}, stop_reason="answered")
    return await server.verify("s", {"question": "?", "expected_answer": expected}, outcome)


EQUAL = [
    ("42", "42"), ("0.4", r"40\%"), (r"40\%", "0.4"), ("40", r"40\%"), ("1250", "1,250"), ("1250", r"1{,}250"),
    ("1000000", r"1\,000\,000"), ("35", r"35\text{ cm}"), ("6, 7", "7, 6"), ("100, 200", "100,200"),
    (r"\{1,2\}", r"\{2,1\}"), (r"\frac{1}{2}", "0.5"), (r"2\sqrt{3}", r"\sqrt{12}"), ("x^2+2x+1", "(x+1)^2"),
    ("6", "x=6"), ("1011_2", "1011_{2}"), (r"\text{even}", "even"), ("(1,2)", "(1, 2)"), (r"\pm 2", "2,-2"),
]  # fmt: skip
UNEQUAL = [
    ("42", "43"), ("1011_2", "1011"), ("1011_2", "1011_8"), (r"\frac13", "0.333"), ("6, 7", "7"), ("6, 7", "6,7,8"),
    ("(1,2)", "(2,1)"), ("[0,1)", "(0,1)"), ("0.4", r"4\%"), ("7", "7$ or $8"), ("7", r"8$, final answer is $7"),
    ("7", ""),
]  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
class TestEquality:
    @pytest.mark.parametrize(("expected", "answer"), EQUAL)
    async def test_equal(self, math: ResourcesServer, expected: str, answer: str) -> None:
        verdict = await score(math, expected, f"So it is $\\boxed{{{answer}}}$.")
        assert (verdict.reward, verdict.resolved) == (1.0, True)

    @pytest.mark.parametrize(("expected", "answer"), UNEQUAL)
    async def test_unequal(self, math: ResourcesServer, expected: str, answer: str) -> None:
        verdict = await score(math, expected, f"So it is $\\boxed{{{answer}}}$.")
        assert (verdict.reward, verdict.resolved) == (0.0, False)

    @pytest.mark.parametrize(
        ("answer", "extracted"),
        [
            (r"\boxed{41} no, \boxed{42}", "42"),
            (r"\boxed{42} and \boxed{4", "42"),
            (r"\boxed{\frac{84}{2}}", r"\frac{84}{2}"),
            (r"\boxed{\boxed{42}}", "42"),
            ("the answer is 42", None),
            ("", None),
        ],
    )
    async def test_the_last_complete_box_counts(
        self, math: ResourcesServer, answer: str, extracted: str | None
    ) -> None:
        verdict = await score(math, "42", answer)
        assert verdict.components["detail"]["extracted"] == extracted
        assert verdict.reward == (0.0 if extracted is None else 1.0)

    async def test_expected_answers_may_be_numbers_or_boxed(self, math: ResourcesServer) -> None:
        assert (await score(math, 42, r"\boxed{42}")).reward == 1.0
        assert (await score(math, 0.5, r"\boxed{\frac12}")).reward == 1.0
        assert (await score(math, r"\boxed{42}", r"\boxed{42}")).reward == 1.0

    async def test_ten_megabytes(self, math: ResourcesServer) -> None:
        assert (await score(math, "42", "x{" * 5_000_000 + r"\boxed{42}")).reward == 1.0
        assert (await score(math, "42", r"\boxed{" + "9" * 10_000_000 + "}")).reward == 0.0

    @pytest.mark.parametrize(
        "answer",
        [
            "9^{9^{9}}",
            r"\frac{" * 200,
            r"__import__('os').system('touch /tmp/owned')",
            "x\x00y \ud800",
            r"\input{/etc/passwd}",
        ],
        ids=["tower", "fractions", "code", "bytes", "input"],
    )
    async def test_hostile_latex_is_wrong_and_harmless(self, math: ResourcesServer, answer: str) -> None:
        assert (await score(math, "7", f"\\boxed{{{answer}}}")).reward == 0.0
        assert (await score(math, "7", r"\boxed{7}")).reward == 1.0

    @pytest.mark.parametrize(
        "row",
        [
            {},
            {"expected_answer": ""},
            {"expected_answer": None},
            {"expected_answer": ["4"]},
            {"expected_answer": True},
            {"reward_model": {"ground_truth": ""}},
            {"reward_model": "4"},
        ],
    )
    async def test_a_row_without_an_answer_is_refused_by_name(self, math: ResourcesServer, row: dict) -> None:
        with pytest.raises(RequestError, match="expected_answer") as refused:
            math.check_row(row)
        assert refused.value.field.startswith("instance.")
        math.check_row({"reward_model": {"ground_truth": "4"}})

    async def test_every_example_is_right_about_itself(self, math: ResourcesServer) -> None:
        lines = (ROOT / "resources_servers/math/data/example.jsonl").read_text().splitlines()
        assert len(lines) == 5
        for row in map(json.loads, lines):
            math.check_row(row)
            assert (await score(math, row["expected_answer"], f"\\boxed{{{row['expected_answer']}}}")).reward == 1.0
            assert (await score(math, row["expected_answer"], r"\boxed{12345}")).reward == 0.0


async def test_an_answer_that_no_grader_can_look_at_in_time_scores_zero_and_says_so() -> None:
    server = math_server(workers=1, timeout_s=0.5)
    await server.start()
    try:
        await score(server, "7", r"\boxed{7.0}")  # imports are warm
        verdict = await score(server, "7", r"\boxed{9^{9^{9}}}")
        assert (verdict.reward, verdict.mask_sample) == (0.0, False)
        assert verdict.components["detail"] == {"eval_timeout": True}
    finally:
        await server.stop()


async def test_a_grader_that_cannot_grade_the_expected_answer_gives_no_reward() -> None:
    server = math_server(workers=1, timeout_s=0.5)
    await server.start()
    try:
        with pytest.raises(EvaluationError):
            await score(server, "{" * 900 + "7" + "}" * 900, r"\boxed{7}")
    finally:
        await server.stop()
