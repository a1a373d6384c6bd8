"""Continuous batching: one thread owns the model, takes new sequences between steps and lets ended ones go at once.

Each step runs one token of every decoding sequence and a bounded chunk of the prompts still to be read, in one packed
pass. Everything the thread owns is touched by it alone; others only put commands into its queue, so a command always
runs between two steps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from prorl_gym.embedded.attention import PackedStep, Row
from prorl_gym.embedded.kv_slots import KVSlots, common_prefix
from prorl_gym.embedded.model import LoadedModel, forward
from prorl_gym.embedded.sampling import Sampled, sample
from prorl_gym.embedded.sequence import Sequence
from prorl_gym.embedded.text import find_stop

log = logging.getLogger(__name__)

#: Prompt tokens per step while others decode: bounds by how much a long prompt delays everyone's next token.
CHUNK_TOKENS_CPU, CHUNK_TOKENS_GPU = 256, 8192


class EngineMetrics(Protocol):
    """What the engine reports, from its own thread."""

    def stepped(self, *, running: int, waiting: int, cache_usage: float, sampled: int) -> None:
        """A step ended, or an idle engine changed; `sampled` counts this step's tokens."""

    def began(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence left the queue."""

    def ended(self, sequence: Sequence) -> None:
        """A sequence ended, however."""


class Engine:
    """Serves sequences on a loaded model.

    Thread-safe: `submit`, `abort`, `replace_weights`, `stop`. `Sequence.on_done` is called on the engine's thread.
    """

    def __init__(self, loaded: LoadedModel, *, max_batch: int, metrics: EngineMetrics) -> None:
        self._loaded = loaded
        self._metrics = metrics
        self._cache = KVSlots(loaded.shape, max_batch, loaded.max_len, loaded.dtype, loaded.device)
        self._chunk = CHUNK_TOKENS_CPU if loaded.device.type == "cpu" else CHUNK_TOKENS_GPU
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether sequences are served."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences; each one's `on_done` follows, also when the engine stops before it began."""
        self._commands.put(lambda: self._waiting.extend(sequences))

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences before the next step, with finish_reason `abort`; harmless for those that have ended."""
        self._commands.put(lambda: self._abort(sequences))

    def replace_weights(self, copy: Callable[[], None]) -> Future[None]:
        """Call `copy`, which overwrites the model's weights, between two steps; its exception is the future's.

        Sequences in flight go on with the new weights, their keys and values computed again: what is sampled after the
        swap is sampled from the new model alone.
        """
        done: Future[None] = Future()

        def command() -> None:
            try:
                copy()
            except Exception as error:  # noqa: BLE001 - reported to the caller, who knows what to do
                done.set_exception(error)
                return
            for sequence in self._running:
                sequence.computed = 0
            self._cache.forget()
            done.set_result(None)

        self._commands.put(command)
        return done

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End everything with `abort` after the step in progress; False if that took longer. Idempotent."""
        self._commands.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self._stopping = True
        self._abort([*self._running, *self._waiting])

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.finish("abort")
        self._collect()
        self._report()

    def _run(self) -> None:
        with torch.inference_mode():
            self._serve()

    def _serve(self) -> None:
        while not self._stopping:
            self._take_commands(block=not self._running and not self._waiting)
            if self._stopping:
                break
            try:
                self._begin_waiting()
                if self._running:
                    self._step()
            except Exception as error:  # noqa: BLE001 - the seam to torch: fails this batch, not the server
                self._fail(error)
            self._collect()
        # A submit that raced with the stop is answered too.
        while not self._commands.empty():
            self._take_commands(block=False)
            self._abort(self._waiting)

    def _take_commands(self, *, block: bool) -> None:
        try:
            while True:
                self._commands.get(block=block)()
                block = False
        except queue.Empty:
            return

    def _begin_waiting(self) -> None:
        """Give free slots to waiting sequences, oldest first."""
        still_waiting: list[Sequence] = []
        for position, sequence in enumerate(self._waiting):
            if not self._cache.free:
                still_waiting.extend(self._waiting[position:])
                break
            if self._prefix_is_being_read(sequence):
                still_waiting.append(sequence)
                continue
            sequence.slot, sequence.computed = self._cache.begin(sequence.prompt_ids)
            sequence.cached_tokens = sequence.computed
            self._running.append(sequence)
            self._metrics.began(prompt_tokens=len(sequence.prompt_ids), cached_tokens=sequence.computed)
        self._waiting = still_waiting

    def _prefix_is_being_read(self, sequence: Sequence) -> bool:
        """Whether another's prefill in progress is most of this one's: the n samples of a prompt arrive together."""
        prompt = sequence.prompt_ids
        reading = [s for s in self._running if s.computed < len(s.prompt_ids)]
        soon = max((common_prefix(prompt, s.prompt_ids) for s in reading), default=0)
        return soon > len(prompt) // 2 and min(soon, len(prompt) - 1) > self._cache.cached(prompt)

    def _step(self) -> None:
        batch = self._plan()
        rows: list[Row] = []
        token_ids: list[int] = []
        for sequence, pending in batch:
            assert sequence.slot is not None  # noqa: S101 - running means having a slot
            rows.append(Row(sequence.slot, sequence.computed, len(token_ids), len(token_ids) + len(pending)))
            token_ids.extend(pending)
        self._cache.reserve(max(row.length for row in rows))
        device = self._loaded.device
        ready = [
            (sequence, row.end - 1)
            for (sequence, _), row in zip(batch, rows, strict=True)
            if row.length == sequence.num_tokens
        ]
        # A step without a finished prompt still needs one row: models take no empty index.
        keep = torch.tensor([index for _, index in ready] or [0], device=device)
        step = PackedStep(rows, self._cache, device)
        logits = forward(self._loaded.model, torch.tensor([token_ids], device=device), step, keep)
        for (sequence, pending), row in zip(batch, rows, strict=True):
            self._cache.extend(row.slot, pending)
            sequence.computed = row.length
        if ready:
            sequences = [sequence for sequence, _ in ready]
            sampled = sample(logits, [s.params for s in sequences], [s.rng.random() for s in sequences])
            for sequence, token in zip(sequences, sampled, strict=True):
                self._accept(sequence, token)
        self._report(sampled=len(ready))

    def _plan(self) -> list[tuple[Sequence, list[int]]]:
        """Which tokens run now: every decoding sequence's one, by slot, then prompts by arrival up to the chunk."""
        budget = self._chunk
        single: list[tuple[Sequence, list[int]]] = []
        chunks: list[tuple[Sequence, list[int]]] = []
        for sequence in self._running:
            if sequence.num_tokens - sequence.computed == 1:
                single.append((sequence, sequence.pending(1)))
            elif budget > 0:
                # A remainder of one token would be a decoding row among the chunks.
                pending = sequence.pending(max(budget, 2))
                chunks.append((sequence, pending))
                budget -= len(pending)
        single.sort(key=lambda item: item[0].slot or 0)
        return single + chunks

    def _accept(self, sequence: Sequence, token: Sampled) -> None:
        """Append a sampled token and see whether it ends the sequence. Order of the checks as in vLLM."""
        params, loaded = sequence.params, self._loaded
        if not math.isfinite(token.logprob):
            sequence.error = "the model computed a logit that is not finite"
            sequence.finish("error")
            return
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        sequence.output_ids.append(token.token_id)
        sequence.logprobs.append(token.logprob)
        sequence.top_logprobs.append(token.top)
        if not params.ignore_eos and token.token_id == loaded.eos_id:
            sequence.finish("stop")
        elif token.token_id in params.stop_token_ids or (
            not params.ignore_eos and token.token_id in loaded.more_eos_ids
        ):
            sequence.finish("stop", token.token_id)
        elif params.stop and (found := find_stop(loaded.codec, sequence.output_ids, params.stop)):
            sequence.finish("stop", found[0])
            sequence.text = found[1]
        elif len(sequence.output_ids) >= params.max_tokens or sequence.num_tokens >= loaded.max_len:
            sequence.finish("length")

    def _collect(self) -> None:
        """Let ended sequences go: their slots are free for the next step."""
        ended = [s for s in (*self._running, *self._waiting) if s.finish_reason is not None]
        if not ended:
            return
        self._running = [s for s in self._running if s.finish_reason is None]
        self._waiting = [s for s in self._waiting if s.finish_reason is None]
        for sequence in ended:
            if sequence.slot is not None:
                if sequence.finish_reason == "error":
                    self._cache.wipe(sequence.slot)
                self._cache.release(sequence.slot)
                sequence.slot = None
            self._metrics.ended(sequence)
            sequence.on_done(sequence)
        self._report()

    def _fail(self, error: Exception) -> None:
        log.exception("a step failed; its %d sequences end with an error", len(self._running))
        for sequence in self._running:
            if sequence.finish_reason is None:
                sequence.error = f"{type(error).__name__}: {error}"
                sequence.finish("error")
        # A layer may have written while a later one did not.
        self._cache.forget()

    def _report(self, *, sampled: int = 0) -> None:
        self._metrics.stepped(
            running=len(self._running), waiting=len(self._waiting), cache_usage=self._cache.usage, sampled=sampled
        )
