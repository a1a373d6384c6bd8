"""The HTTP application: one pure-ASGI layer that checks, dispatches and answers; FastAPI describes it.

The invariant: every answer of 400 and above has the one JSON error shape, and nothing that a client sends is a 500.
"""

import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

import prorl_gym
from prorl_gym.errors import (
    ConfigError,
    ForeignOrigin,
    JobError,
    MethodNotAllowed,
    NoSuchPath,
    RequestError,
    Unauthorized,
)
from prorl_gym.server.answers import ErrorAnswer, error_answer, request_error_answer
from prorl_gym.server.control_routes import ControlRoutes
from prorl_gym.server.job_routes import JobRoutes
from prorl_gym.server.operation import ClientGone, Operation, header
from prorl_gym.server.service import Service

log = logging.getLogger(__name__)

DESCRIPTION = """
Rollout as a service for RL training of multi-turn LLM agents.

Post a row to `/process` (or `/jobs`): the service starts a sandbox, runs a tool-using agent against the registered
inference endpoints, scores the outcome and returns the trajectory as the tokens the model saw and sampled.

Every error is `{"error": {"type", "message", "field"?}}`. Bodies must be `application/json` (else 415). When the server
has a token, every path but `/health` wants `Authorization: Bearer TOKEN`.
"""

PUBLIC_PATHS = frozenset({"/health"})
DOCUMENTS = frozenset({"/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"})
"""FastAPI's own pages."""


class RolloutApp(FastAPI):
    """FastAPI whose operations are served by the layer here: none of its middleware is on a job's way."""

    def __init__(self, operations: Iterable[Operation], *, token: str | None, max_body_bytes: int) -> None:
        super().__init__(title="prorl_gym", version=prorl_gym.__version__, description=DESCRIPTION)
        self._token = None if token is None else token.encode()
        self._max_body_bytes = max_body_bytes
        self._fixed: dict[str, dict[str, Operation]] = {}
        self._patterned: list[tuple[re.Pattern[str], Operation]] = []
        for operation in operations:
            if operation.pattern is None:
                self._fixed.setdefault(operation.path, {})[operation.method] = operation
            else:
                self._patterned.append((operation.pattern, operation))
            self._describe(operation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        response = await self._answer(scope, receive)
        if response is not None:
            await response(scope, receive, send)
        elif scope["path"] in DOCUMENTS:
            await super().__call__(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer; None when FastAPI has it, or nobody waits for one any more."""
        try:
            self._authorize(scope)
            refuse_foreign_page(scope)
            found = self._find(scope)
            if found is None:
                return None
            operation, path_params = found
            return await operation.answer(Request(scope, receive), path_params, self._max_body_bytes)
        except ClientGone:
            return None
        except Exception as error:  # noqa: BLE001 - the seam to HTTP: whatever broke, the client gets an answer
            return self._error(scope, error)

    def _error(self, scope: Scope, error: Exception) -> Response:
        match error:
            case RequestError():
                return request_error_answer(error)
            case ConfigError():
                return error_answer(400, "ConfigError", str(error))
            case JobError():
                return error_answer(502, type(error).__name__, str(error))
            case RecursionError():
                return error_answer(400, "RequestError", "the body is nested too deeply")
        log.error("%s %s broke", scope["method"], scope["path"], exc_info=error)
        return error_answer(500, "InternalError", "the service broke on this request; its log says where")

    def _authorize(self, scope: Scope) -> None:
        """Check the bearer token in constant time.

        Raises:
            Unauthorized: It is missing or wrong.
        """
        if self._token is None or scope["path"] in PUBLIC_PATHS:
            return
        scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise Unauthorized("this server wants its bearer token: Authorization: Bearer TOKEN")

    def _find(self, scope: Scope) -> tuple[Operation, Mapping[str, str]] | None:
        """The operation that a request names and its path's parameters; None for FastAPI's own pages.

        Raises:
            NoSuchPath, MethodNotAllowed: There is none.
        """
        path, method = scope["path"], scope["method"]
        by_method = self._fixed.get(path)
        path_params: Mapping[str, str] = {}
        if by_method is None:
            by_method = {}
            for pattern, operation in self._patterned:
                if match := pattern.fullmatch(path):
                    by_method[operation.method] = operation
                    path_params = match.groupdict()
        found = by_method.get("GET" if method == "HEAD" else method)
        if found is not None:
            return found, path_params
        if by_method:
            raise MethodNotAllowed(f"{path[:200]} takes {', '.join(sorted(by_method))}", allowed=sorted(by_method))
        if path in DOCUMENTS:
            return None
        raise NoSuchPath(f"no such path: {path[:200]}; /docs lists them")

    def _describe(self, operation: Operation) -> None:
        about = operation.description
        responses: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase} for status in about.errors
        }
        if about.media_type != "application/json":
            responses[about.status] = {"content": {about.media_type: {"schema": {"type": "string"}}}}
        self.add_api_route(
            operation.path,
            operation.endpoint,
            methods=[operation.method],
            response_model=about.reply,
            response_class=JSONResponse if about.media_type == "application/json" else Response,
            status_code=about.status,
            responses=responses,
            summary=about.summary,
            tags=[about.tag],
        )

    def openapi(self) -> dict[str, Any]:
        """FastAPI's document, without the 422 that is never sent, and with the bearer token where one is asked for."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        for methods in document["paths"].values():
            for described in methods.values():
                described["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        if self._token is not None:
            document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"bearer": []}]
        return document


def refuse_foreign_page(scope: Scope) -> None:
    """Refuse commands that a browser sends on behalf of another site's page: loopback needs no token.

    Raises:
        ForeignOrigin: The request has an origin, and it is not this server.
    """
    if scope["method"] in ("GET", "HEAD"):
        return
    origin = header(scope, b"origin")
    if origin is not None and origin.partition(b"://")[2] != header(scope, b"host"):
        raise ForeignOrigin("pages of other sites may not command this service")


def create_app(service: Service) -> RolloutApp:
    """The application of a service. Starting and stopping the service is the caller's."""
    operations = (*JobRoutes(service.pipeline).operations, *ControlRoutes(service).operations)
    return RolloutApp(operations, token=service.token, max_body_bytes=service.config.server.max_body_bytes)
