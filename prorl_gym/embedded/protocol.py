"""vLLM's wire format for what the service uses: requests checked field by field, replies built, errors shaped.

Source: vLLM 0.32, `entrypoints/openai/completion/protocol.py` and `serving.py`. A field that vLLM knows and this server
does not is accepted only with the value that changes nothing, and refused by name otherwise; an unknown one likewise.
Defaults for sampling are OpenAI's (temperature 1, top_p 1), never the model's generation_config.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prorl_gym.embedded.sequence import SamplingParams
from prorl_gym.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128

#: Fields of vLLM's request that this server does not implement, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "cache_salt": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "min_tokens": (None, 0),
    "parallel_tool_calls": (None, True),
    "presence_penalty": (None, 0),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "spaces_between_special_tokens": (None, True, False),
    "stream": (None, False),
    "stream_options": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
}


BodyT = TypeVar("BodyT", bound=BaseModel)


class BadRequest(RequestError):
    """The request is malformed or asks for what this server does not do; `field` names the parameter."""


class ModelNotFound(RequestError):
    """The request names another model than the served one."""

    status = 404


class EngineFailure(RequestError):
    """The engine broke while serving this request."""

    status = 500


class EngineStopping(RequestError):
    """The server is shutting down."""

    status = 503


class NotJson(RequestError):
    """The body is declared to be something else than JSON."""

    status = 415


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _SamplingRequest(_Wire):
    """What both kinds of generation have in common."""

    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    """None: as many as fit into max_model_len."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """0 and -1 mean off."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    request_id: str | None = Field(None, max_length=256)
    user: str | None = None

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to report beside the sampled one; None: no logprobs at all."""
        raise NotImplementedError

    def sampling(self, prompt_len: int, max_model_len: int, index: int) -> SamplingParams:
        """Parameters of sample `index` of a prompt of `prompt_len` tokens; sample i of a seeded request uses seed + i.

        Raises:
            BadRequest: Prompt and output would exceed the model's length.
        """
        room = max_model_len - prompt_len
        wanted = max(room, 1) if self.max_tokens is None else self.max_tokens
        if wanted > room:
            raise BadRequest(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{prompt_len + wanted} tokens ({prompt_len} in the prompt, {wanted} in the completion). "
                "Please reduce the length of the prompt or max_tokens.",
                field="max_tokens" if room >= 1 else self.prompt_field,
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=wanted,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed + index,
            stop=tuple(s for s in stop if s),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            top_logprobs=self.alternatives or 0,
        )


class ChatRequest(_SamplingRequest):
    """Body of POST /v1/chat/completions. Tool calls in the answer stay text: who asks for tools parses them."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[dict[str, Any]] = Field(min_length=1)
    """As the model's chat template takes them."""
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_limit(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("max_completion_tokens") is not None:
            return {**body, "max_tokens": body["max_completion_tokens"]}
        return body

    @property
    def alternatives(self) -> int | None:
        """See the base class."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_SamplingRequest):
    """Body of POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Any
    """Token ids, text, or a list of either."""
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """None: no logprobs. 0: the sampled token's. k: and the k most likely ones'."""
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int | None:
        """See the base class."""
        return self.logprobs

    def prompts(self, vocab_size: int) -> list[list[int] | str]:
        """The prompts, ids checked against the vocabulary.

        Raises:
            BadRequest: Empty, of another type, or an id outside the vocabulary.
        """
        prompt = self.prompt
        nested = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if nested else [prompt]
        for item in prompts:
            if not isinstance(item, str | list) or not item:
                raise BadRequest(
                    "prompt: expected a non-empty list of token ids, a non-empty string, or a list of either",
                    field="prompt",
                )
            if isinstance(item, list):
                for token_id in item:
                    if type(token_id) is not int:
                        raise BadRequest(f"prompt: token ids are integers, got {token_id!r:.80}", field="prompt")
                    if not 0 <= token_id < vocab_size:
                        raise BadRequest(
                            f"prompt: token id {token_id} is out of vocabulary (0 to {vocab_size - 1})", field="prompt"
                        )
        return list(prompts)


class TokenizeRequest(_Wire):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default as in vLLM: true for a prompt; a conversation's template brings its own."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Wire):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class ReloadArguments(_Wire):
    """`kwargs` of the one method of POST /collective_rpc."""

    weights_path: str | None = None
    """A folder with another checkpoint of the served model; None reads the served one's folder again."""


class CollectiveRpc(_Wire):
    """Body of POST /collective_rpc."""

    method: Literal["reload_weights"]
    args: list[Any] = Field([], max_length=0)
    kwargs: ReloadArguments = ReloadArguments()
    timeout: float | None = None


def parse(kind: type[BodyT], body: object) -> BodyT:
    """Check a decoded JSON body.

    Raises:
        BadRequest: Names the first parameter that is wrong, unknown or unsupported.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    known = {name: value for name, value in body.items() if name in kind.model_fields or name not in NEUTRAL}
    for name in body.keys() - known.keys():
        if not any(type(body[name]) in (type(v), float, int) and body[name] == v for v in NEUTRAL[name]):
            raise BadRequest(f"{name}={body[name]!r:.80} is not supported by the embedded server", field=name)
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = "unknown parameter" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadRequest(f"{name}: {message}", field=name) from error


ERROR_TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "BadRequestError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in the shape of vLLM and OpenAI."""
    kind = ERROR_TYPES.get(status, "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
