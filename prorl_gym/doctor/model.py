"""The policy's backends and renderer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import ProrlConfig
from prorl_gym.daemon_thread import in_daemon_thread
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.errors import ConfigError, RequestError
from prorl_gym.tokens.loading import load_renderer
from prorl_gym.types import LlmServer


@asynccontextmanager
async def registered(config: ProrlConfig) -> AsyncIterator[BackendPool]:
    """The pool, for the block."""
    pool = BackendPool(config.backend)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def backends(config: ProrlConfig) -> tuple[list[Finding], list[LlmServer]]:
    """Each of `backend.addresses` is asked what it is."""
    findings, servers = [], []
    if not config.backend.addresses:
        words = "none in backend.addresses: tasks wait until POST /add_llm_server brings one"
        return [note("backends", words)], []
    async with registered(config) as pool:
        for address in config.backend.addresses:
            name = f"backend {address}"
            try:
                server = await pool.add(address)
            except RequestError as error:
                findings.append(failed(name, str(error), "correct backend.addresses, or the key's variable"))
                continue
            if server.healthy:
                servers.append(server)
                words = f"serves {server.model} ({server.dialect}, {server.max_model_len or '?'} tokens)"
                findings.append(ok(name, words))
            else:
                fix = f"look whether the engine runs and this host reaches it: curl {server.address}/v1/models"
                findings.append(failed(name, server.detail or "it does not answer", fix))
    return findings, servers


async def renderer(config: ProrlConfig, servers: list[LlmServer]) -> Finding:
    """The renderer is loaded and proven, as the first job would have it."""
    name, model = "renderer", config.policy.model
    if model == "auto":
        served = next((server.model for server in servers if server.model), None)
        if served is None:
            words = "policy.model=auto: proven when the first backend says what it serves"
            return note(name, words, "set policy.model to have it proven now")
        model = served
    try:
        made = await in_daemon_thread(load_renderer, config.policy, model)
    except ConfigError as error:
        fix = "set policy.tokenizer (a local folder or hub id), policy.renderer=template, or another policy.model"
        return failed(name, f"{model}: {error}", fix)
    return ok(name, f"{model}: proven on probe conversations ({made.name})")
