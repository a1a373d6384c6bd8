"""What the server sends: JSON bodies, and errors in one shape."""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from prorl_gym.errors import MethodNotAllowed, RequestError
from prorl_gym.server.json_body import encode_json


class ErrorDetail(BaseModel):
    """What was wrong with a request."""

    type: str
    """Name of the error's class in `prorl_gym.errors`; InternalError for a fault of the service."""
    message: str
    field: str | None = None
    """Path of the offending field of the body or the query, e.g. `sampling_params.top_p`."""


class ErrorAnswer(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: ErrorDetail


class JsonAnswer(Response):
    """A JSON body; `content` may be encoded already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode, unless it is bytes."""
        return content if isinstance(content, bytes) else encode_json(content)


def error_answer(
    status: int, kind: str, message: str, *, field: str | None = None, headers: dict[str, str] | None = None
) -> JsonAnswer:
    """An error in the one shape that clients know."""
    detail = {"type": kind, "message": message}
    if field is not None:
        detail["field"] = field
    return JsonAnswer({"error": detail}, status_code=status, headers=headers)


def request_error_answer(error: RequestError) -> JsonAnswer:
    """The answer that a RequestError stands for."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return error_answer(error.status, type(error).__name__, str(error), field=error.field, headers=headers)


def invalid_field(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, in words that do not repeat the body's values."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    path = _path(first)
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
    if len(problems) > 1:
        others = ", ".join(_path(problem) or "the body" for problem in problems[1:4])
        message += f" (and {len(problems) - 1} more: {others})"
    return RequestError(f"{path}: {message}" if path else message, field=path or None)


def _path(problem: ErrorDetails) -> str:
    return ".".join(str(part) for part in problem["loc"])[:200]
