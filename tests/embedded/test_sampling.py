"""The cuts and the draw at the size of a real vocabulary, against transformers' own warpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from prorl_gym.embedded.sampling import CANDIDATES, sample
from prorl_gym.embedded.sequence import SamplingParams

VOCABULARY = 20_000
CUTS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"top_k": CANDIDATES + 500},
    {"top_k": CANDIDATES + 500, "top_p": 0.7},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"min_p": 1e-4, "top_k": 300, "top_p": 0.99},
    {"top_p": 1e-6},
]
WARPERS: dict[str, Any] = {"min_p": MinPLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}


def logits(spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(CUTS), VOCABULARY, generator=generator) * spread


# 6: what a model gives; 0.5: so flat that most of the vocabulary stays.
@pytest.mark.parametrize("spread", [6.0, 0.5])
def test_cuts_leave_what_transformers_leaves(spread: float) -> None:
    rows = logits(spread)
    params = [SamplingParams(max_tokens=1, top_logprobs=VOCABULARY, **cuts) for cuts in CUTS]
    for row, cuts, sampled in zip(rows, CUTS, sample(rows, params, [0.5] * len(CUTS)), strict=True):
        warpers = LogitsProcessorList([WARPERS[name](cuts[name]) for name in WARPERS if name in cuts])
        expected = warpers(torch.zeros(1, 1, dtype=torch.long), row[None])[0].log_softmax(-1)
        got = torch.full_like(expected, -torch.inf)
        ids, values = zip(*sampled.top, strict=True)
        got[list(ids)] = torch.tensor(values)
        # Where the mass reaches top_p, rounding decides on one token.
        assert ((got > -torch.inf) != (expected > -torch.inf)).sum() <= 1
        both = (got > -torch.inf) & (expected > -torch.inf)
        torch.testing.assert_close(got[both], expected[both], atol=1e-3, rtol=0)
        assert sampled.logprob == pytest.approx(got[sampled.token_id].item())
        assert sampled.logprob > float("-inf")


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[0.1, 0.2, 0.0, 0.7]]).log()
    draws = 2000
    params = [SamplingParams(max_tokens=1)] * draws
    uniforms = [(i + 0.5) / draws for i in range(draws)]
    ids = [sampled.token_id for sampled in sample(row.expand(draws, -1), params, uniforms)]
    assert [ids.count(token) for token in range(4)] == [200, 400, 0, 1400]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_the_impossible(uniform: float) -> None:
    row = torch.tensor([[float("-inf"), 1.0, 2.0, float("-inf")]])
    (sampled,) = sample(row, [SamplingParams(max_tokens=1)], [uniform])
    assert sampled.token_id == (1 if uniform == 0.0 else 2)
