"""Throughput of the embedded server at 1, 4 and 16 concurrent requests, against raw `transformers.generate`.

Run it on an idle machine: `python tests/benchmarks/bench_embedded.py [--model smollm2]`. Prompts are random ids of
equal length and end tokens are ignored, so every request costs the same; the best of the repeats is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from prorl_gym.embedded.model_prep import DEFAULT_MODEL, prepare

PROMPT_TOKENS, SAMPLED_TOKENS = 128, 64
CONCURRENCIES = (1, 4, 16)
START_TIMEOUT_S = 120


@contextmanager
def server(model: Path, *flags: str) -> Iterator[str]:
    """Run the embedded server; it ends with this process."""
    watched, held = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        command = [sys.executable, "-m", "prorl_gym.embedded", "--model", str(model), "--watch-fd", str(watched)]
        process = subprocess.Popen(
            [*command, "--address-file", str(address), *flags], pass_fds=[watched], stderr=subprocess.DEVNULL
        )
        os.close(watched)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not address.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start (exit code {process.poll()})")
                time.sleep(0.05)
            yield address.read_text()
        finally:
            os.close(held)
            process.wait(10)


def prompt(seed: int, vocabulary: int = 40_000) -> list[int]:
    """Random ids; every seed gives a prompt of its own, so nothing is found in the cache."""
    rng = random.Random(seed)
    return [rng.randrange(100, vocabulary) for _ in range(PROMPT_TOKENS)]


async def complete(session: aiohttp.ClientSession, ids: list[int], max_tokens: int = SAMPLED_TOKENS) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == 200, reply
        return reply


async def serve_rate(address: str, concurrent: int, repeats: int) -> float:
    """Sampled tokens per second, prompts read included."""
    best = 0.0
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(address, timeout=timeout) as session:
        await complete(session, prompt(-1), 4)
        for repeat in range(repeats):
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for index in range(concurrent):
                    group.create_task(complete(session, prompt(1000 * concurrent + 100 * repeat + index)))
            best = max(best, concurrent * SAMPLED_TOKENS / (time.perf_counter() - started))
    return best


async def turn_times(address: str) -> tuple[float, float]:
    """Seconds to the first token of a 2,048-token prompt, new and as the next turn of a known conversation."""
    history = [token for seed in range(16) for token in prompt(seed + 90_000)]
    async with aiohttp.ClientSession(address) as session:
        started = time.perf_counter()
        first = await complete(session, history, 1)
        new = time.perf_counter() - started
        longer = history + first["choices"][0]["token_ids"] + prompt(99_999)[:32]
        started = time.perf_counter()
        await complete(session, longer, 1)
        return new, time.perf_counter() - started


def floor_rate(model: Any, batch: int, repeats: int) -> float:
    """Sampled tokens per second of one static batch of `transformers.generate`: no server, nothing joins or leaves."""
    import torch

    best = 0.0
    for repeat in range(repeats):
        ids = torch.tensor([prompt(1000 * batch + 100 * repeat + index) for index in range(batch)])
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                min_new_tokens=SAMPLED_TOKENS, max_new_tokens=SAMPLED_TOKENS,
            )  # fmt: skip
        best = max(best, batch * SAMPLED_TOKENS / (time.perf_counter() - started))
    return best


def floors(folder: Path, dtype: str, repeats: int) -> dict[int, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    floor_rate(model, 1, 1)
    return {batch: floor_rate(model, batch, repeats) for batch in CONCURRENCIES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what the server would choose")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    folder = prepare(options.model)
    dtype = options.dtype or default_dtype()
    with server(folder, "--dtype", dtype, "--device", "cpu") as address:
        served = {n: asyncio.run(serve_rate(address, n, repeats)) for n in CONCURRENCIES}
        new, next_turn = asyncio.run(turn_times(address))
    raw = floors(folder, dtype, repeats)
    table = Table(
        title=f"{folder.name}, {dtype}, CPU: {PROMPT_TOKENS} prompt + {SAMPLED_TOKENS} sampled tokens a request"
    )
    for heading in ("concurrent", "served tok/s", "times 1", "transformers tok/s", "times 1", "served / transformers"):
        table.add_column(heading, justify="right")
    for n in CONCURRENCIES:
        table.add_row(
            str(n), f"{served[n]:.1f}", f"{served[n] / served[1]:.2f}",
            f"{raw[n]:.1f}", f"{raw[n] / raw[1]:.2f}", f"{served[n] / raw[n]:.2f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"first token of 2,048: new {1e3 * new:.0f} ms, next turn of a known conversation {1e3 * next_turn:.0f} ms"
    )


def default_dtype() -> str:
    from prorl_gym.embedded.model import native_bfloat16

    return "bfloat16" if native_bfloat16() else "float32"


if __name__ == "__main__":
    main()
