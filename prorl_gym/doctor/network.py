"""The network: off where it should be, loopback inside, addresses of their own where the host's is shared."""

import asyncio
import secrets
import socket
from contextlib import AsyncExitStack

from prorl_gym.doctor import inside
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.doctor.subject import Neighbours, Subject, ask

_SHARERS = 3


async def network_is_off(pair: Neighbours) -> Finding:
    """Nothing of the host's network answers, the service's port least of all."""
    name = "network none"
    abstract = f"prorl_gym-doctor-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        port = server.getsockname()[1]
        found = await ask(pair.second, inside.reaches, port, abstract)
    if not found:
        return ok(name, "no route, no port of the host's loopback (the service's), no abstract socket")
    words = "reachable inside: " + ", ".join(found)
    if "network" in pair.second.describe().unenforced:
        return note(name, f"{words}; this kind isolates no network", "choose runtime=bubblewrap or runtime=apptainer")
    return failed(
        name, words, "do not serve untrusted agents here: a network namespace was asked for and the sandbox is not in "
        "one; choose another runtime, and look whether bwrap or apptainer is wrapped by a script of this host",
    )  # fmt: skip


async def loopback_works(pair: Neighbours) -> Finding:
    """A server inside is reached from inside."""
    name = "loopback inside"
    why = await ask(pair.first, inside.talks_to_itself)
    if why is None:
        return ok(name, "a server on 127.0.0.1 is reached from inside")
    return failed(
        name, f"a server on 127.0.0.1 inside cannot be reached: {why}",
        "agents could test no server they start: run outside a restricted container (it forbids to bring lo up)",
    )  # fmt: skip


async def addresses_are_unique(subject: Subject) -> Finding:
    """Sandboxes on the host's network have an address each, and serve one port at the same time."""
    name = "addresses (network host)"
    async with AsyncExitStack() as stack:
        sandboxes = [subject.sandbox(network="host") for _ in range(_SHARERS)]
        for sandbox in sandboxes:
            await stack.enter_async_context(sandbox)
        addresses = [sandbox.describe().address for sandbox in sandboxes]
        if None in addresses:
            return note(name, f"{subject.spec.kind} gives sandboxes on the host's network no address of their own yet")
        if len(set(addresses)) < _SHARERS or "127.0.0.1" in addresses:
            return failed(
                name, f"not unique: {', '.join(map(str, addresses))}",
                "report this with `ss -xap | grep prorl_gym-loopback`; until then use network: none",
            )  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        problems = await asyncio.gather(
            *(ask(sandbox, inside.listens, address, port)
              for sandbox, address in zip(sandboxes, addresses, strict=True))
        )  # fmt: skip
    if any(problems):
        return failed(
            name, f"port {port} of an address of its own cannot be served: {next(filter(None, problems))}",
            "network: host needs 127.0.0.0/8 on interface lo (`ip address show lo`); else use network: none",
        )  # fmt: skip
    return ok(name, f"{_SHARERS} sandboxes on the host's network served one port at once, on addresses of their own")
