"""What the served tokens are measured against: the same model run by transformers alone, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Reference:
    """A model in float32."""

    def __init__(self, folder: Path) -> None:
        # Two threads would spin for each other on cores that the servers need.
        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """transformers' own greedy continuation."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()

    def next_logprobs(self, prompt: list[int]) -> list[float]:
        """Log-probability of every id as the next one."""
        with torch.inference_mode():
            return self.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).tolist()

    def logprobs(self, prompt: list[int], output: list[int], *, temperature: float = 1.0, **cuts: Any) -> list[float]:
        """Log-probability of each output id in the distribution it should have been sampled from."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
            if name in cuts:
                warpers.append(warper(cuts[name]))
        ids = torch.tensor([prompt + output])
        with torch.inference_mode():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        processed = warpers(ids, logits).log_softmax(-1)
        return processed[torch.arange(len(output)), output].tolist()
