"""Turns logits into sampled ids and the log-probabilities of the distribution they were sampled from.

Conventions are those of vLLM with `--logprobs-mode processed_logprobs`: temperature, then min-p, top-k and top-p, then
one softmax; tokens that were cut off have log-probability -inf. Greedy rows (temperature below 1e-5) ignore top-k,
top-p and min-p and report the softmax of the raw logits, as if the temperature were 1.
Source: vLLM 0.32, `v1/sample/sampler.py` and `sampling_params.py`.

A row is drawn by inverting its cumulative distribution at one uniform number of its own generator, so a seeded request
gives the same tokens whoever shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from prorl_gym.embedded.sequence import SamplingParams

#: How many of the most likely tokens are sorted before all are: nearly always enough, and a tenth of the time.
CANDIDATES = 2048


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token: id, natural log-probability, and the `top_logprobs` most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def sample(logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[Sampled]:
    """Sample one token per row.

    Args:
        logits: [N, V], any float dtype; not changed.
        params: [N].
        uniforms: [N] numbers in [0, 1); a greedy row's is not used.

    Returns:
        [N]. A row of non-finite logits gives a non-finite logprob; the caller must refuse it.
    """
    logits = logits.float()
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    cut = [i for i, p in enumerate(params) if p.truncates]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        logits = logits.index_copy(0, rows, _truncate(logits[rows], [params[i] for i in cut]))
    logprobs = logits.log_softmax(dim=-1)
    ids = logprobs.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        ids[rows] = _draw(logprobs[rows], [uniforms[i] for i in drawn], ids[rows])
    chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    tops = _top(logprobs, params)
    return [Sampled(*item) for item in zip(ids.tolist(), chosen, tops, strict=True)]


def _truncate(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Set what min-p, top-k and top-p cut off to -inf. logits: [N, V]."""
    cut, whole = _cut_among(logits, params, min(CANDIDATES, logits.shape[-1]))
    if not all(whole):
        again = [i for i, complete in enumerate(whole) if not complete]
        rows = torch.tensor(again, device=logits.device)
        cut[rows] = _cut_among(logits[rows], [params[i] for i in again], logits.shape[-1])[0]
    return cut


def _cut_among(logits: torch.Tensor, params: Seq[SamplingParams], width: int) -> tuple[torch.Tensor, list[bool]]:
    """Cut, looking only at the `width` most likely tokens; [N] says for which rows nothing beyond them would stay."""
    min_p = torch.tensor([p.min_p for p in params], device=logits.device)[:, None]
    top_k = torch.tensor([p.top_k or logits.shape[-1] for p in params], device=logits.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=logits.device)[:, None]
    # p < min_p * p_max, in logs; log(0) = -inf cuts nothing.
    logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
    best, ids = logits.topk(width, dim=-1)
    best = best.masked_fill(torch.arange(width, device=logits.device)[None] >= top_k, -torch.inf)
    total = torch.where(top_k <= width, best.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    probs = (best - total).double().exp()
    # A token stays while the mass before it is below top_p, so the first always stays; 1.0 must cut nothing.
    before = probs.cumsum(dim=-1) - probs
    best = best.masked_fill((before >= top_p) & (top_p < 1.0), -torch.inf)
    # A top-k beyond the width would also need the mass up to it.
    whole = (best[:, -1] == -torch.inf) & ((top_k <= width) | (top_k >= logits.shape[-1]))[:, 0]
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, best), whole.tolist()


def _draw(logprobs: torch.Tensor, uniforms: Seq[float], best: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution, in float64. logprobs: [N, V]; best: [N], for when rounding overshoots."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    # Scaled by the real total: rounding must not leave a gap beyond the last token.
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None] * cumulative[:, -1:]
    # right=True finds the first strictly larger sum, which a token of probability zero can never be.
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logprobs.shape[-1] - 1)[:, 0]
    possible = logprobs.gather(1, ids[:, None])[:, 0] > -torch.inf
    return torch.where(possible, ids, best)


def _top(logprobs: torch.Tensor, params: Seq[SamplingParams]) -> list[list[tuple[int, float]]]:
    width = max(p.top_logprobs for p in params)
    if width == 0:
        return [[] for _ in params]
    values, ids = logprobs.topk(min(width, logprobs.shape[-1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), params, strict=True)
    return [list(zip(row_ids, row_values, strict=True))[: p.top_logprobs] for row_ids, row_values, p in rows]
