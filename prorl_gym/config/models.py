"""The configuration below the command line: frozen models, validated once.

The invariant: nothing below the command line sees a DictConfig or a bare dict of settings. Unknown keys of our own
models are errors; fields of foreign servers pass through untouched. Each field is documented here and nowhere else.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, IPvAnyNetwork

from prorl_gym.runtimes.base import RuntimeKind

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _expanded(path: object) -> Path:
    return Path(os.path.expandvars(str(path))).expanduser()


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def usable_cpus() -> int:
    """CPUs this process may run on: the smaller of its affinity mask and its cgroup quota, at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quotas = [affinity]
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            fields = Path(quota_file).read_text().split()
            quota = int(fields[0])
            period = int(Path(period_file).read_text()) if period_file else int(fields[1])
        except (OSError, ValueError, IndexError):
            continue  # not this cgroup version, or no quota ("max")
        if quota > 0 and period > 0:
            quotas.append(max(1, quota // period))
    return max(1, min(quotas))


class PoolConfig(_Model):
    """One stage's pool."""

    workers: int = Field(ge=1, le=100_000)
    """Jobs that may be inside the stage at once; `PATCH /pools` changes it while running."""


class PipelineConfig(_Model):
    """Stages, budgets and queue bounds."""

    init: PoolConfig = Field(default_factory=lambda: PoolConfig(workers=max(4, 2 * usable_cpus())))
    run: PoolConfig = Field(default_factory=lambda: PoolConfig(workers=max(16, 16 * usable_cpus())))
    eval: PoolConfig = Field(default_factory=lambda: PoolConfig(workers=max(4, 2 * usable_cpus())))
    ready_ahead: int | None = Field(None, ge=1)
    """Sandboxes that may be started and not yet in RUN; None is `run.workers`."""
    max_queued: int = Field(10_000, ge=1)
    """Jobs that have not reached INIT; one more is a 429."""
    timeout_s: PositiveSeconds = 3600.0
    """Default budget of a job, counted only while a stage executes."""
    on_run_timeout: Literal["skip", "evaluate"] = "skip"
    """Whether a RUN over its budget is scored all the same."""
    cancel_grace_s: PositiveSeconds = 5.0
    """How long a handler may take to end after a cancel before it is abandoned and its slot freed."""
    blocked_loop_warning_s: PositiveSeconds = 0.5
    """A handler that holds the event loop for longer is named in the log."""


class ResultsConfig(_Model):
    """How long finished jobs stay fetchable."""

    ttl_s: PositiveSeconds = 3600.0
    max_count: int = Field(20_000, ge=1)
    """Beyond it the oldest result goes first."""
    max_bytes: int = Field(2 << 30, ge=1)
    """Memory that all of them may keep, estimated; beyond it the oldest goes first, the newest stays in any case."""


class ServerConfig(_Model):
    """The HTTP face."""

    host: str = "127.0.0.1"
    port: int = Field(8006, ge=0, le=65535)
    """0 lets the system choose; the address is printed and written to `address_file`."""
    address_file: Path | None = None
    """Written atomically once the server listens: `http://HOST:PORT`."""
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token; None asks for none."""
    insecure: bool = False
    """Allow a bind beyond loopback, or tasks with the host's network, without a token."""
    autostart: bool = True
    """Start the pools with the server; else they wait for POST /start."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    shutdown_s: PositiveSeconds = 25.0
    """From SIGTERM to the end of the process (Slurm kills after 30 s)."""
    access_log: bool = False


class BackendConfig(_Model):
    """Inference endpoints and how tasks are spread over them."""

    addresses: tuple[str, ...] = ()
    """Registered at start for the policy `default`; more come by POST /add_llm_server."""
    dialect: Literal["auto", "vllm"] = "auto"
    api_key_env: str | None = None
    """Name of the environment variable that holds the engines' key; it is sent to every engine that is registered
    without a key of its own."""
    api_key_envs: tuple[str, ...] = ()
    """Further variables that `POST /add_llm_server` may name as `api_key_env`: nothing else leaves the environment."""
    routing: Literal["least_in_flight", "least_assigned"] = "least_in_flight"
    wait_s: PositiveSeconds = 3600.0
    """How long a task waits for a backend to be registered, its timer paused."""
    connect_timeout_s: PositiveSeconds = 5.0
    call_timeout_s: PositiveSeconds = 1800.0
    """One model call, start to last byte."""
    health_interval_s: PositiveSeconds = 5.0
    unhealthy_wait_s: PositiveSeconds = 60.0
    """How long a task whose backends are all registered but dead keeps trying; its timer runs."""
    max_calls_per_backend: int | None = Field(None, ge=1)


class SamplingDefaults(_Model):
    """Used where a request says nothing."""

    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int = Field(4096, ge=1)
    """Sampled tokens per turn."""
    max_model_len: int | None = Field(None, ge=1)


class PolicyConfig(_Model):
    """The model whose tokens are rendered and parsed."""

    model: str = "auto"
    """Local folder or hub id; `auto` takes what the first registered backend says it serves."""
    tokenizer: str | None = None
    """Local folder or hub id when it is not the model's own."""
    renderer: str = "auto"
    """`auto`, `template`, or the name of a family that the `renderers` library knows."""
    tool_call_format: Literal["auto", "hermes", "fenced"] = "auto"
    thinking: Literal["template", "keep"] = "template"
    """Whether past thinking follows the template's own rule or is kept, so that the episode stays one segment."""
    sampling: SamplingDefaults = SamplingDefaults()


class SandboxLimits(_Model):
    """Bounds on one sandbox; null is no limit."""

    memory_mb: int | None = Field(4096, ge=16)
    processes: int | None = Field(512, ge=8)
    file_mb: int | None = Field(2048, ge=1)
    disk_mb: int | None = Field(4096, ge=1)
    output_bytes: int = Field(64_000, ge=1_000)


class RuntimeConfig(_Model):
    """The sandbox that tasks get unless their agent says otherwise."""

    kind: RuntimeKind = "bubblewrap"
    image: str | None = None
    """Root filesystem directory or .sif; null is the host's own /usr, read-only."""
    network: Literal["none", "host"] = "none"
    fakeroot: bool = False
    """Apptainer: the agent is root inside, of its own user namespace, and may change any file of a .sif."""
    gpu: bool = False
    """Apptainer: pass the host's NVIDIA GPUs through (`--nv`)."""
    workdir: str = "/workspace"
    start_timeout_s: PositiveSeconds = 60.0
    disk: Literal["host", "memory"] = "host"
    """Bubblewrap: agents write to the file system of `paths.state`, or to memory, where `limits.disk_mb` holds."""
    limits: SandboxLimits = SandboxLimits()


class SandboxOverride(_Model):
    """An agent's own wishes over the runtime group; a key left out keeps the group's value."""

    runtime: RuntimeKind | None = None
    image: str | None = None
    network: Literal["none", "host"] | None = None
    fakeroot: bool | None = None
    """Null with `setup` in Apptainer is true: what apt and pip install must be root's."""
    gpu: bool | None = None
    limits: SandboxLimits | None = None
    setup: tuple[str, ...] = ()
    """Shell commands run in INIT; one that fails fails INIT."""
    setup_network: Literal["none", "host"] | None = None
    """The network of `setup` alone; what it started is ended with it. Null is as in RUN."""


class WebConfig(_Model):
    """Where `web_search` and `web_fetch` get what they give."""

    provider: Literal["local", "searxng", "tavily"] = "local"
    """`local` searches and reads the folder `documents`, nothing else; the others search the web and read its pages."""
    documents: Annotated[Path | None, BeforeValidator(lambda v: v and _expanded(v))] = None
    """Of `local`: .txt, .md and .rst files, and .jsonl files of rows with `text` and perhaps `title`, `id`, `url`."""
    address: str | None = Field(None, pattern="^https?://")
    """SearXNG's own address. Of `tavily`: null is its public one."""
    api_key_env: str | None = None
    """Name of the environment variable that holds Tavily's key."""
    max_results: int = Field(8, ge=1, le=50)
    """Of one search; the model may ask for fewer."""
    page_characters: int = Field(20_000, ge=200)
    """Of a page's text, shown by one call."""
    max_page_bytes: int = Field(4 << 20, ge=1024, le=8 << 20)
    """Of a page as it is fetched; the rest is left out."""
    max_redirects: int = Field(5, ge=0, le=20)
    attempts: int = Field(3, ge=1, le=10)
    """Of one call, where another may do better; all within its time."""
    search_timeout_s: PositiveSeconds = 20.0
    fetch_timeout_s: PositiveSeconds = 30.0
    concurrent: int = Field(32, ge=1)
    """Calls at work at once; more wait."""
    blocked_networks: tuple[IPvAnyNetwork, ...] = ()
    """Public networks that no page is fetched from, a cluster's own say. What is not public is always refused."""


class ToolConfig(_Model):
    """Bounds on the agent's tools."""

    bash_timeout_s: PositiveSeconds = 120.0
    ipython_timeout_s: PositiveSeconds = 120.0
    file_editor_timeout_s: PositiveSeconds = 30.0
    max_timeout_s: PositiveSeconds = 600.0
    """The longest a model may ask for in one call."""
    observation_tokens: int = Field(8192, ge=64)
    """One observation's length in the prompt; longer ones keep head and tail."""
    web: WebConfig = WebConfig()


class PathsConfig(_Model):
    """Where files go. `~` and variables are expanded."""

    state: Annotated[Path, BeforeValidator(_expanded)]
    """Node-local: sandboxes' folders, the tool environment, records of what runs."""
    images: Annotated[Path, BeforeValidator(_expanded)]
    """May be shared between nodes."""


class ImagesConfig(_Model):
    """Images: which ones data rows may name, and how images are built and fetched."""

    allow: tuple[str, ...] = ()
    """Glob patterns; a row's image that matches none is refused."""
    mode: Literal["scratch", "versioned", "lock"] = "lock"
    """When a built image is used again: never; while base and framework version are the same; while base and lock file
    are. A changed definition is another image in every mode."""
    format: Literal["sif", "directory"] = "sif"
    """`directory` starts faster and serves bubblewrap too; `sif` is one file, which suits shared file systems."""
    bases: dict[str, str] = {}
    """Definition → source it starts from, in place of its own: docker://NAME:TAG, oras://..., localimage:/FILE.sif,
    debootstrap:SUITE@MIRROR."""
    values: dict[str, dict[str, Any]] = {}
    """Definition → values for its template, over its own."""
    fakeroot: bool = True
    """Build as root of a user namespace (wants a line in /etc/subuid, or the program fakeroot). False for a service
    that is fully root."""
    parallel: int = Field(4, ge=1, le=64)
    """Images built or fetched at once."""
    timeout_s: PositiveSeconds = 7200.0
    """One build or fetch."""
    auth_file: Path | None = None
    """Credentials for registries in Docker's format, as `apptainer build --authfile` takes them."""
    plain_http: bool = False
    """Speak HTTP to registries, for one on the local network."""


class LoggingConfig(_Model):
    """How the service speaks."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["auto", "text", "json"] = "auto"
    """`auto`: readable on a terminal, JSON lines elsewhere."""


class Reference(_Model):
    """NeMo Gym's pointer from one server to another."""

    type: str
    name: str


class ResourcesServerConfig(BaseModel):
    """One resources server instance: NeMo Gym's fields, and whatever its own code reads."""

    model_config = ConfigDict(extra="allow", frozen=True)

    entrypoint: str = "app.py"
    domain: str = "other"
    url: str | None = None
    """Of a running NeMo Gym resources server; None loads `entrypoint` in process."""

    @property
    def own_fields(self) -> dict[str, Any]:
        """The fields that only the server's own code knows."""
        return dict(self.model_extra or {})


class AgentConfig(_Model):
    """One agent instance: a task that requests can name."""

    entrypoint: str = "app.py"
    resources_server: Reference | None = None
    model_server: Reference | None = None
    tools: tuple[str, ...] = ()
    max_turns: int = Field(16, ge=1)
    max_steps: int | None = Field(None, ge=1)
    """NeMo Gym's name for the same bound; the smaller counts."""
    sandbox: SandboxOverride | None = SandboxOverride()
    """Null runs without a sandbox; then no sandbox tool may be named."""
    datasets: tuple[dict[str, Any], ...] = ()
    prompt: dict[str, Any] = {}
    """Values the agent's own templates use."""
    description: str | None = None


class Environment(_Model):
    """One servable task: an agent instance joined with its resources server."""

    name: str
    """Agent instance name; requests may leave `_agent` off."""
    agent_type: str
    """Folder under `agents/`."""
    agent: AgentConfig
    resources_type: str | None = None
    """Folder under `resources_servers/`; None for an agent without one."""
    resources_name: str | None = None
    resources: ResourcesServerConfig | None = None


class ProrlConfig(_Model):
    """The whole service."""

    environments: tuple[Environment, ...] = ()
    handlers: dict[str, str] = {}
    """Task name → `package.module:Class` of an AgentHandler."""
    task_aliases: dict[str, str] = {}
    """Data-set name → task."""
    pipeline: PipelineConfig = PipelineConfig()
    results: ResultsConfig = ResultsConfig()
    server: ServerConfig = ServerConfig()
    backend: BackendConfig = BackendConfig()
    policy: PolicyConfig = PolicyConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tool: ToolConfig = ToolConfig()
    images: ImagesConfig = ImagesConfig()
    logging: LoggingConfig = LoggingConfig()
    paths: PathsConfig
    roots: tuple[Path, ...] = ()
    """Search roots for `agents/` and `resources_servers/`, first hit wins; found by the command line."""
