"""The HTTP side: requests become sequences for the engine, ended sequences become replies.

A call whose client goes away is cancelled, and cancelling a call aborts its sequences: their slots are free before the
next step. Every error has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prorl_gym.embedded.engine import Engine
from prorl_gym.embedded.metrics import Metrics
from prorl_gym.embedded.model import LoadedModel, copy_weights, read_weights
from prorl_gym.embedded.protocol import (
    BadRequest,
    ChatRequest,
    CollectiveRpc,
    CompletionRequest,
    DetokenizeRequest,
    EngineFailure,
    EngineStopping,
    ModelNotFound,
    NotJson,
    TokenizeRequest,
    error_body,
    parse,
)
from prorl_gym.embedded.replies import chat_reply, completion_reply
from prorl_gym.embedded.sequence import SamplingParams, Sequence
from prorl_gym.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

#: Room for a batch of long prompts as ids; more is a mistake.
MAX_BODY_BYTES = 64 * 2**20


class Api:
    """The routes of one served model."""

    def __init__(self, engine: Engine, loaded: LoadedModel, metrics: Metrics, *, model: str) -> None:
        self._engine = engine
        self._loaded = loaded
        self._metrics = metrics
        self._model = model
        self._started = int(time.time())
        self._swapping = asyncio.Lock()

    def application(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`, or disconnects are not noticed."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/collective_rpc", self._collective_rpc)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "prorl_gym",
            "root": self._loaded.path,
            "parent": None,
            "max_model_len": self._loaded.max_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _completions(self, http: web.Request) -> web.Response:
        request = parse(CompletionRequest, await _body(http))
        self._check_model(request.model)
        wanted: list[tuple[list[int], SamplingParams]] = []
        for prompt in request.prompts(self._loaded.vocab_size):
            ids = prompt if isinstance(prompt, list) else await self._encode(prompt, request.add_special_tokens)
            for index in range(request.n or 1):
                wanted.append((ids, request.sampling(len(ids), self._loaded.max_len, index)))
        sequences = await self._generate(wanted)
        reply_id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
        return _json(completion_reply(request, reply_id, self._model, sequences, self._loaded.codec))

    async def _chat(self, http: web.Request) -> web.Response:
        request = parse(ChatRequest, await _body(http))
        self._check_model(request.model)
        ids = await asyncio.to_thread(self._render, request)
        samples = [(ids, request.sampling(len(ids), self._loaded.max_len, i)) for i in range(request.n or 1)]
        sequences = await self._generate(samples)
        reply_id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
        return _json(chat_reply(request, reply_id, self._model, sequences, self._loaded.codec))

    def _render(self, request: ChatRequest | TokenizeRequest) -> list[int]:
        try:
            return self._loaded.codec.render(
                request.messages or [],
                request.tools,
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
        except ValueError as error:
            raise BadRequest(f"messages: {error}", field="messages") from error

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = await asyncio.to_thread(self._loaded.codec.encode, text, add_special_tokens=add_special_tokens)
        if not ids:
            raise BadRequest("prompt: the text has no tokens", field="prompt")
        return ids

    async def _generate(self, wanted: list[tuple[list[int], SamplingParams]]) -> list[Sequence]:
        """Run sequences to their end; cancelling, or the failure of one, aborts them all."""
        if not self._engine.alive:
            raise EngineStopping("the server is stopping")
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Sequence] = asyncio.Queue()

        def on_done(sequence: Sequence) -> None:
            loop.call_soon_threadsafe(ended.put_nowait, sequence)

        sequences = [Sequence(ids, params, on_done) for ids, params in wanted]
        self._engine.submit(sequences)
        whole = False
        try:
            for _ in sequences:
                sequence = await ended.get()
                if sequence.finish_reason == "error":
                    raise EngineFailure(sequence.error or "the engine failed")
                if sequence.finish_reason == "abort":
                    raise EngineStopping("the server is stopping")
            whole = True
        finally:
            if not whole:
                self._engine.abort(sequences)
        return sequences

    async def _tokenize(self, http: web.Request) -> web.Response:
        request = parse(TokenizeRequest, await _body(http))
        self._check_model(request.model)
        ids = await asyncio.to_thread(self._token_ids, request)
        strings = [self._loaded.codec.decode([i], skip_special_tokens=False) for i in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._loaded.max_len,
                "tokens": ids,
                "token_strs": strings if request.return_token_strs else None,
            }
        )

    def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("expected exactly one of prompt and messages", field="prompt")
        if request.prompt is None:
            return self._render(request)
        return self._loaded.codec.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)

    async def _detokenize(self, http: web.Request) -> web.Response:
        request = parse(DetokenizeRequest, await _body(http))
        self._check_model(request.model)
        if any(token_id >= self._loaded.vocab_size for token_id in request.tokens):
            raise BadRequest("tokens: an id is out of vocabulary", field="tokens")
        text = await asyncio.to_thread(self._loaded.codec.decode, request.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    async def _collective_rpc(self, http: web.Request) -> web.Response:
        request = parse(CollectiveRpc, await _body(http))
        loaded = self._loaded
        async with self._swapping:
            try:
                path = request.kwargs.weights_path or loaded.path
                weights = await asyncio.to_thread(read_weights, loaded, path)
            except ConfigError as error:
                raise BadRequest(str(error), field="kwargs.weights_path") from error
            await asyncio.wrap_future(self._engine.replace_weights(lambda: copy_weights(loaded, weights)))
        log.info("weights replaced by those of %s", path)
        return _json({"results": [None]})

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            raise ModelNotFound(f"The model `{model}` does not exist; this server has `{self._model}`.", field="model")


async def _body(http: web.Request) -> object:
    if http.content_type != "application/json":
        raise NotJson("the body must be declared as JSON: Content-Type: application/json")
    try:
        return orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _json(error_body(error.status, str(error), error.field), error.status)
    except web.HTTPException as error:
        return _json(error_body(error.status, error.text or error.reason), error.status)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _json(error_body(500, f"{type(error).__name__}: {error}"), 500)
