"""What the next prompt costs: appending to sampled ids, beside rendering the whole conversation again.

Each turn adds 64 sampled tokens and a tool result of about 1,000 characters. Both sides run in turn, so noise hits
both; the floor is a copy of the ids, which no renderer can do without. Real tokenizers are used where they are cached.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prorl_gym.config.models import PolicyConfig
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.tokens.bridge import BridgingRenderer
from prorl_gym.tokens.loading import load_renderer
from prorl_gym.tokens.records import ChatMessage, ToolRequest

TURNS = (1, 10, 50, 200)
ROUNDS = 7
CACHE = Path.home() / ".cache" / "prorl_gym"
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object"}}}]
ROW = "{:<20} {:>6} {:>8} {:>12.0f} {:>17.0f} {:>12.0f} {:>9.1f}"
HEADER = (
    f"{'tokenizer':<20} {'turns':>6} {'tokens':>8} {'extend us':>12} {'less the copy us':>17} {'again us':>12} x faster"
)
RESULT = "".join(f"line {n}: the quick brown fox\n" for n in range(32))


def renderers() -> Iterator[tuple[str, BridgingRenderer]]:
    yield "one token per byte", byte_renderer()
    for name, folder, family in (
        ("SmolLM2, template", CACHE / "models" / "SmolLM2-135M-Instruct", "template"),
        ("Qwen3, template", CACHE / "tokenizers" / "qwen3-3.7.2", "template"),
        ("Qwen3, library", CACHE / "tokenizers" / "qwen3-3.7.2", "qwen3"),
    ):
        if folder.is_dir():
            renderer = load_renderer(PolicyConfig(renderer=family), str(folder))
            assert isinstance(renderer, BridgingRenderer)
            yield name, renderer
        else:
            print(f"{name}: {folder} is not there, left out")


def median_us(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        count, start = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - start < 0.02:
            action()
            count += 1
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times) * 1e6


def measure(name: str, renderer: BridgingRenderer, turns: int, rounds: int) -> None:
    request = ToolRequest("call_0_0", "bash", {"command": "ls -l"})
    said = ChatMessage("assistant", "I will look at the files.", tool_requests=(request,))
    result = ChatMessage("tool", RESULT, tool_call_id="call_0_0", name="bash")
    history = [ChatMessage("user", "Fix the bug."), *[said, result] * (turns - 1), said]
    output = [*renderer.vocabulary.encode(renderer.vocabulary.guard("word " * 63))[:63], renderer.close_id or 0]
    prompt = renderer.start(history[:-1], TOOLS).ids
    copied = [*prompt, *output]
    extend = median_us(lambda: renderer.extend(history, prompt, output, [result], TOOLS), rounds)
    again = median_us(lambda: renderer.whole([*history, result], TOOLS, None), rounds)
    copy = median_us(lambda: [*copied], rounds)
    print(ROW.format(name, turns, len(copied), extend, extend - copy, again, again / extend))


def main(rounds: int) -> None:
    print(HEADER)
    for name, renderer in renderers():
        for turns in TURNS:
            measure(name, renderer, turns, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    main(1 if parser.parse_args().quick else ROUNDS)
