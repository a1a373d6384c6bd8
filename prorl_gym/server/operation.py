"""One endpoint, bound to its typed signature without FastAPI's per-request machinery.

An endpoint is an ordinary FastAPI endpoint and FastAPI describes it in the OpenAPI document. Its arguments are filled
here instead: bodies by the strict JSON parser, every problem as a RequestError, never a 422.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from prorl_gym.errors import BodyTooLarge, UnsupportedMedia
from prorl_gym.server.answers import invalid_field
from prorl_gym.server.json_body import parse_json

Endpoint = Callable[..., Awaitable[Response]]


class ClientGone(Exception):
    """The connection closed before the request was answered."""


@dataclass(frozen=True, slots=True)
class Description:
    """What the OpenAPI document says of an endpoint beyond its signature and docstring."""

    summary: str
    tag: str
    reply: Any
    status: int = 200
    errors: tuple[int, ...] = ()
    media_type: str = "application/json"


class Operation:
    """A method on a path.

    Attributes:
        method: HTTP method.
        path: With `{name}` for its parameters.
        endpoint: Async; takes any of `request: Request`, one pydantic body (with a default: it may be left out), one
            pydantic model marked `Query()`, and the path's parameters by name.
        description: For the OpenAPI document.
    """

    def __init__(self, method: str, path: str, endpoint: Endpoint, description: Description) -> None:
        self.method = method
        self.path = path
        self.endpoint = endpoint
        self.description = description
        self.pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)) if "{" in path else None
        self._request: str | None = None
        self._query: tuple[str, type[BaseModel]] | None = None
        self._body: tuple[str, type[BaseModel], bool] | None = None
        for name, parameter in inspect.signature(endpoint, eval_str=True).parameters.items():
            kind = parameter.annotation
            if kind is Request:
                self._request = name
            elif get_origin(kind) is Annotated:
                self._query = (name, get_args(kind)[0])
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                self._body = (name, kind, parameter.default is not inspect.Parameter.empty)

    async def answer(self, request: Request, path_params: Mapping[str, str], max_body_bytes: int) -> Response:
        """Fill the endpoint's arguments and call it.

        Raises:
            RequestError: The request does not fit the signature, or the endpoint refused it.
            ClientGone: The connection closed.
        """
        arguments: dict[str, Any] = dict(path_params)
        if self.method != "GET":
            raw = await read_body(request, max_body_bytes)
            if raw:
                check_media_type(request.scope)
            if self._body is not None:
                name, model, optional = self._body
                if raw or not optional:
                    arguments[name] = validated(model, parse_json(raw))
        if self._query is not None:
            arguments[self._query[0]] = validated(self._query[1], _query_fields(request.scope["query_string"]))
        if self._request is not None:
            arguments[self._request] = request
        return await self.endpoint(**arguments)


def validated(model: type[BaseModel], fields: object) -> BaseModel:
    """`fields` as a model; what does not fit is a RequestError that names it."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def check_media_type(scope: Scope) -> None:
    """Refuse a body that is not declared as JSON.

    Raises:
        UnsupportedMedia: It is declared as something else, or not at all.
    """
    declared = header(scope, b"content-type") or b""
    if declared.split(b";", 1)[0].strip().lower() != b"application/json":
        said = declared[:100].decode("latin-1") or "none"
        raise UnsupportedMedia(f"only application/json is accepted; content-type is {said}")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, whatever its framing.

    Raises:
        BodyTooLarge: It is declared longer than `max_bytes`, or turns out to be.
        ClientGone: The connection closed in the middle.
    """
    declared = header(request.scope, b"content-length")
    if declared is not None and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {int(declared)} bytes, server.max_body_bytes is {max_bytes}")
    chunks: list[bytes] = []
    length = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        length += len(chunk)
        if length > max_bytes:
            raise BodyTooLarge(f"the body is longer than server.max_body_bytes, which is {max_bytes}")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks) if len(chunks) > 1 else chunks[0]


def _query_fields(query_string: bytes) -> dict[str, str | list[str]]:
    """A key that stands once gives its value, one that is repeated the list of them."""
    values: dict[str, list[str]] = {}
    for key, value in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        values.setdefault(key, []).append(value)
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}
