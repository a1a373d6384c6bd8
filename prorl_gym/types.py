"""What crosses the wire: requests, results and their parts.

The invariant: everything here is plain data that a trainer can import with pydantic alone. Requests refuse unknown
keys; results ignore them, so that an older client reads a newer server.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


def _no_path_step(job_id: str) -> str:
    if job_id in {".", ".."}:
        raise ValueError("a URL cannot end in it: clients resolve it away")
    return job_id


JobId = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x2e\x30-\x7e]+$"), AfterValidator(_no_path_step)
]
"""Printable ASCII without spaces and without `/`, not `.` or `..`: an id stands in a URL and in logs."""

IGNORED_SAMPLING_KEYS = frozenset({
    "model", "api_key", "base_url", "modify_params", "log_completions", "native_tool_calling", "custom_tokenizer",
    "token_level_generation", "ensure_thinking_end_properly", "strict_loop_detector", "enable_vision",
    "enable_a11y_tree",
})  # fmt: skip
"""Keys that clients of the released ProRL server send for its own engine adapter."""


class JobStatus(StrEnum):
    """Where a job is; the last four are final."""

    QUEUED = "queued"
    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"

    @property
    def final(self) -> bool:
        """True once nothing about the job can change."""
        return self in _FINAL


_FINAL = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.TIMEOUT})


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    SUBMITTED = "submitted"
    ENVIRONMENT_DONE = "environment_done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_EXHAUSTED = "context_exhausted"
    LOOP = "loop"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def terminated(self) -> bool:
        """True when the agent or the task ended the episode; false when a budget or a fault cut it."""
        return self in _TERMINATED


_TERMINATED = frozenset({StopReason.ANSWERED, StopReason.SUBMITTED, StopReason.ENVIRONMENT_DONE})


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SamplingParams(_Request):
    """How to sample. None means the service's default (`policy.sampling`), then the engine's."""

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_output_tokens"))
    """Sampled tokens per turn."""
    max_model_len: int | None = Field(None, ge=1)
    """Prompt and sampled tokens together; the smaller of this and the engine's own counts."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)] | None = None
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    enable_thinking: bool | None = None
    max_turns: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_turns", "max_iterations"))
    """Model calls per episode; the smaller of this and the agent's own counts."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _set_foreign_keys_aside(
        cls, value: Any, handler: ModelWrapValidatorHandler["SamplingParams"]
    ) -> "SamplingParams":
        if not isinstance(value, dict):
            return handler(value)
        ignored = tuple(sorted(IGNORED_SAMPLING_KEYS & value.keys()))
        parsed = handler({key: v for key, v in value.items() if key not in IGNORED_SAMPLING_KEYS})
        parsed._ignored = ignored
        return parsed

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys of a released client that mean nothing here, sorted; named once in the result's warnings."""
        return self._ignored


class StageTimeouts(_Request):
    """Optional budget per stage, in seconds of that stage actually executing."""

    init: float | None = Field(None, gt=0, allow_inf_nan=False)
    run: float | None = Field(None, gt=0, allow_inf_nan=False)
    eval: float | None = Field(None, gt=0, allow_inf_nan=False)


ResultPart = Literal["messages", "segments", "token_ids", "ledger", "artifacts"]
"""`messages` is text only; `token_ids` adds the per-message ids, which grow with the square of the turns."""


class JobRequest(_Request):
    """One rollout to make."""

    job_id: JobId | None = None
    """The client's own and idempotent; None lets the service choose."""
    task: str | None = Field(None, max_length=200)
    instance: dict[str, Any]
    """One data row, untrusted; unknown columns are kept."""
    sampling_params: SamplingParams = SamplingParams()
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    stage_timeouts_s: StageTimeouts = StageTimeouts()
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)
    """Higher first, FIFO within one priority."""
    group_id: str | None = Field(None, min_length=1, max_length=200)
    policy: PolicyName = "default"
    cancel_on_disconnect: bool = False
    return_ledger: bool = False
    include: tuple[ResultPart, ...] | None = None
    """Which parts of the result to send; None sends all but the ledger, as released clients expect."""


class ToolCall(_Reply):
    """One tool call as the model wrote it.

    `arguments` is None when the call was malformed; `error` then says how, in the words the model was told.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None = None
    error: str | None = None


class Message(_Reply):
    """One message of the episode, with the tokens it stands for.

    Shapes: `token_ids: [T]`; for the assistant also `input_ids: [P]` (the exact prompt of the call),
    `output_ids: [T]` and `logprobs: [T]` (natural log, of the sampling distribution, one per output id).
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    agent: str = "main"
    segment: int | None = None
    """Index into `segments`; None while no model call has seen the message."""
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    policy_version: int | None = None


class Segment(_Reply):
    """A maximal append-only token sequence, ready to train on.

    Shapes: `prompt_ids: [P]`; `response_ids`, `response_mask` (1 = sampled), `logprobs` (0.0 where the mask is 0): [R].
    `versions` holds half-open spans `[start, end, version]` over `response_ids`, sampled ids only. The last response id
    is a sampled one.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int | None]] = []
    agent: str = "main"
    num_turns: int = 0


class Failure(_Reply):
    """What broke, where, and in whose words."""

    stage: Literal["init", "run", "eval"] | None = None
    kind: str
    message: str


class PolicyVersions(_Reply):
    """Oldest and newest policy that sampled a token of this job; None when no backend gave a version."""

    min: int | None = None
    max: int | None = None


class Timing(_Reply):
    """Seconds. `*_time` keep the released names; `queued` and `active` are per stage."""

    init_time: float = 0.0
    run_time: float = 0.0
    eval_time: float = 0.0
    others_time: float = 0.0
    counted_elapsed: float = 0.0
    timeout_triggered: bool = False
    queued: dict[str, float] = {}
    active: dict[str, float] = {}


class JobResult(_Reply):
    """How one job ended. A job that ran and failed is a result too."""

    job_id: str
    instance_id: str | None = None
    trajectory_id: str | int | None = None
    group_id: str | None = None
    task: str
    status: JobStatus
    stop_reason: StopReason | None = None
    reward: float | None = None
    reward_components: dict[str, Any] = {}
    resolved: bool | None = None
    success: bool = False
    mask_sample: bool = False
    filter: bool = False
    failure: Failure | None = None
    error: str | None = None
    traceback: str | None = None
    """A name of the released format, always null here: where a fault was raised is in the service's log."""
    critical_error: Literal["init", "run", "eval", "timeout", "cancelled"] | None = None
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    finish: bool = False
    end_properly: bool = False
    git_patch: str | None = None
    artifacts: dict[str, Any] = {}
    segments: list[Segment] = []
    policy_versions: PolicyVersions = PolicyVersions()
    timing: Timing = Timing()
    ledger: list[dict[str, Any]] | None = None
    provenance: dict[str, Any] = {}
    warnings: list[str] = []


class JobView(_Reply):
    """Where a job is right now, and its result once it has one."""

    job_id: str
    status: JobStatus
    messages: list[Message] = []
    result: JobResult | None = None


class LlmServer(_Reply):
    """One registered inference endpoint, as `/llm_servers` and `/status` show it."""

    address: str
    policy: str = "default"
    policy_version: int | None = None
    dialect: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    healthy: bool = False
    detail: str | None = None
    """Why it is not healthy, or why the jobs of its policy are refused; else None."""
    in_flight: int = 0
    assigned: int = 0


class ServerStatus(_Reply):
    """Counts and occupancies of the whole service at one moment."""

    status: Literal["running", "stopping", "stopped"]
    instance_id: str
    jobs: dict[str, int] = {}
    total: int = 0
    init_queue: int = 0
    run_queue: int = 0
    eval_queue: int = 0
    active_init: int = 0
    active_run: int = 0
    active_eval: int = 0
    pools: dict[str, Any] = {}
    llm_servers: list[LlmServer] = []
    llm_calls_in_flight: int = 0
    leftovers: list[dict[str, Any]] = []
