"""A scripted language model behind real HTTP, in vLLM's dialect; made for tests and benchmarks.

Invariant: except for the scripted faults every answer is what vLLM would send: ids, logprobs and usage agree, prompts
beyond `max_model_len` are refused, `max_tokens` cuts. One call costs about 0.1 ms of CPU.

In process::

    async with ScriptedLlm([Reply(text="4")]) as llm:
        ...  # llm.address, llm.requests

As its own process: `prorl_gym.testing.scripted_llm`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from prorl_gym.testing.byte_tokenizer import ByteTokenizer, Tokenizer
from prorl_gym.testing.http_wire import Exchange, HttpConnection
from prorl_gym.testing.script import PromptIndex, Reply, ReplyFunction, Script, as_script
from prorl_gym.testing.vllm_reply import DEFAULT_MAX_TOKENS, ReplyEncoder


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """One completion call as the server saw it.

    Attributes:
        index: Its number, from 0.
        prompt_ids: [P] the prompt; empty when the server keeps no prompts.
        params: The body without the prompt.
        arrived_s: Monotonic time at which the request was complete.
        turn: How many different earlier prompts are prefixes of this one.
        attempt: How often this prompt was seen before.
        status: The HTTP status answered; None while open and after a fault without an answer.
        closed_after_s: Seconds until the client closed the connection of the unanswered request, else None.
    """

    index: int
    prompt_ids: Sequence[int]
    params: dict[str, Any]
    arrived_s: float
    turn: int
    attempt: int
    status: int | None = None
    closed_after_s: float | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """A call without an answer yet."""

    exchange: Exchange
    record: RecordedRequest
    prompt: list[int]
    reply: Reply
    timer: asyncio.TimerHandle | None = None


class ScriptedLlm:
    """The server; an async context manager, or `start` and `stop` (both harmless twice; it can start again).

    Args:
        script: A `Script`, one `Reply`, a list of turns, or a function of prompt ids and request index.
        tokenizer: Encodes `Reply.text`; the built-in byte tokenizer by default.
        model: The id in /v1/models; calls for another model get a 404.
        max_model_len: Prompt + max_tokens beyond it get a 400, as from vLLM.
        api_key: When set, every path below /v1 needs it as bearer token.
        host: Address to bind.
        port: 0 takes a free one; the same one is taken again after a stop.
        keep_prompts: Keep every prompt in `requests`; turn it off for long benchmarks.

    Attributes:
        requests: Every completion call so far.
        healthy: Set it to False and /health answers 503.
        health_checks: How often /health was asked.
        in_flight: Calls without an answer now.
        max_in_flight: Their maximum so far.
    """

    def __init__(
        self,
        script: Script | Reply | Sequence[Reply | Sequence[Reply]] | ReplyFunction,
        *,
        tokenizer: Tokenizer | None = None,
        model: str = "scripted",
        max_model_len: int = 32768,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        keep_prompts: bool = True,
    ) -> None:
        self._reply: ReplyFunction | None = None
        self._script = Script()
        if callable(script):
            self._reply = script
        else:
            self._script = as_script(script)
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.model = model
        self.max_model_len = max_model_len
        self.api_key = api_key
        self.healthy = True
        self.health_checks = 0
        self.requests: list[RecordedRequest] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self._host = host
        self._port = port
        self._keep_prompts = keep_prompts
        self._index = PromptIndex()
        self._open: dict[int, _Open] = {}
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._watchers: set[asyncio.Future[None]] = set()
        self._encoder = ReplyEncoder(self.tokenizer, model)

    @property
    def address(self) -> str:
        """The base URL, without /v1."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> Self:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: HttpConnection(self._serve, self._connections), self._host, self._port, backlog=4096
            )
            self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for opened in list(self._open.values()):
            self._end(opened)
        for connection in list(self._connections):
            connection.abort()
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def release(self, count: int | None = None) -> int:
        """Answer calls that are held (`Reply.hold`), the oldest first; return how many.

        Args:
            count: At most so many; None answers all.
        """
        held = [opened for opened in self._open.values() if opened.reply.hold][:count]
        for opened in held:
            self._answer(opened)
        return len(held)

    async def until(self, condition: Callable[[ScriptedLlm], bool], timeout_s: float = 10.0) -> None:
        """Wait until the condition holds; it is looked at whenever a call arrives, ends or loses its client.

        Raises:
            TimeoutError: It did not hold in time.
        """
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                watcher = asyncio.get_running_loop().create_future()
                self._watchers.add(watcher)
                try:
                    await watcher
                finally:
                    self._watchers.discard(watcher)

    def _notify(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    # -- requests -------------------------------------------------------------------------------------------------

    def _serve(self, exchange: Exchange) -> None:
        path = exchange.path
        if path == "/health":
            self.health_checks += 1
            exchange.answer(200 if self.healthy else 503, b"")
            self._notify()
        elif path.startswith("/v1/") and not self._authorized(exchange):
            exchange.answer(401, b'{"error":"Unauthorized"}')
        elif path == "/v1/models":
            exchange.answer(200, self._models())
        elif path == "/v1/completions" and exchange.method == "POST":
            self._complete(exchange)
        elif path == "/requests":
            exchange.answer(200, self._recorded())
        else:
            exchange.answer(404, b'{"detail":"Not Found"}')

    def _authorized(self, exchange: Exchange) -> bool:
        return self.api_key is None or exchange.headers.get(b"authorization") == f"Bearer {self.api_key}".encode()

    def _models(self) -> bytes:
        card = {
            "id": self.model,
            "object": "model",
            "created": self._encoder.created,
            "owned_by": "vllm",
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
        return orjson.dumps({"object": "list", "data": [card]})

    def _recorded(self) -> bytes:
        """Serve what was recorded, without prompts: not vLLM's, for a test that runs the server as a process."""
        calls = [
            {
                "index": r.index,
                "prompt_tokens": len(r.prompt_ids),
                "turn": r.turn,
                "status": r.status,
                "closed_after_s": r.closed_after_s,
            }
            for r in self.requests
        ]
        return orjson.dumps({"in_flight": self.in_flight, "max_in_flight": self.max_in_flight, "requests": calls})

    def _complete(self, exchange: Exchange) -> None:
        try:
            params = orjson.loads(exchange.body)
            prompt = params.pop("prompt")
            packed = array("I", prompt)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            _refuse(exchange, 400, "BadRequestError", "the body is JSON with a prompt that is a list of token ids")
            return
        turn, attempt = self._index.add(packed)
        record = RecordedRequest(
            index=len(self.requests),
            prompt_ids=packed if self._keep_prompts else (),
            params=params,
            arrived_s=time.monotonic(),
            turn=turn,
            attempt=attempt,
        )
        self.requests.append(record)
        if not self._acceptable(exchange, record, prompt):
            return
        if self._reply is not None:
            reply = self._reply(prompt, record.index)
        else:
            reply = self._script.pick(turn, attempt, lambda: self.tokenizer.decode(prompt))
        opened = _Open(exchange, record, prompt, reply)
        self._open[record.index] = opened
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        exchange.lost.append(lambda: self._client_left(opened))
        if reply.delay_s > 0:
            opened.timer = asyncio.get_running_loop().call_later(reply.delay_s, self._answer, opened)
        elif not reply.hold and reply.fault != "hang":
            self._answer(opened)
        self._notify()

    def _acceptable(self, exchange: Exchange, record: RecordedRequest, prompt: list[int]) -> bool:
        params = record.params
        max_tokens = params.get("max_tokens", DEFAULT_MAX_TOKENS)
        if params.get("model") not in {None, self.model}:
            record.status = 404
            _refuse(exchange, 404, "NotFoundError", f"The model `{params['model']}` does not exist.")
        elif not prompt:
            record.status = 400
            _refuse(exchange, 400, "BadRequestError", "The decoder prompt cannot be empty")
        elif not isinstance(max_tokens, int) or max_tokens < 1:
            record.status = 400
            _refuse(exchange, 400, "BadRequestError", f"max_tokens must be at least 1, got {max_tokens}.")
        elif len(prompt) + max_tokens > self.max_model_len:
            record.status = 400
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, {max_tokens} for the completion)."
            )
            _refuse(exchange, 400, "BadRequestError", message)
        return record.status is None

    def _client_left(self, opened: _Open) -> None:
        opened.record.closed_after_s = time.monotonic() - opened.record.arrived_s
        self._end(opened)

    def _end(self, opened: _Open) -> None:
        if self._open.pop(opened.record.index, None) is not None:
            self.in_flight -= 1
            if opened.timer is not None:
                opened.timer.cancel()
            self._notify()

    # -- answers --------------------------------------------------------------------------------------------------

    def _answer(self, opened: _Open) -> None:
        reply, exchange, record = opened.reply, opened.exchange, opened.record
        if reply.fault == "hang":
            return
        self._end(opened)
        if reply.fault == "refuse":
            exchange.refuse()
            return
        if reply.fault == "status":
            record.status = reply.status
            _refuse(exchange, reply.status, "InternalServerError", "scripted fault")
            return
        record.status = 200
        body = self._encoder.body(record.index, opened.prompt, record.params, reply)
        if reply.fault == "die_mid_body":
            exchange.die_mid_body(200, body)
        elif reply.fault == "invalid_json":
            exchange.answer(200, body[:-20])
        elif reply.fault == "not_an_object":
            exchange.answer(200, b"[]")
        else:
            exchange.answer(200, body)


def _refuse(exchange: Exchange, status: int, kind: str, message: str) -> None:
    error = {"message": message, "type": kind, "param": None, "code": status}
    exchange.answer(status, orjson.dumps({"error": error}))
