"""Where the service listens: its socket, its address, and the file that tells others."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from prorl_gym.config.models import ServerConfig
from prorl_gym.errors import ConfigError


def bind(config: ServerConfig, *, has_token: bool) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: The port is taken, the host is none of ours, or it is reachable by others without a token.
    """
    host, port = config.host, config.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"server.host={host}: no such address: {error}") from error
    family, _, _, _, target = found[0]
    if not (has_token or config.insecure or ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback):
        raise ConfigError(
            f"server.host={host} lets other machines command this service; set server.token_env=NAME (bearer token in "
            "$NAME), or server.insecure=true where the network is trusted"
        )
    # The protocol is given because asyncio sets TCP_NODELAY only where it is: else each answer on a kept-alive
    # connection waits 40 ms for a delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_problem(host, port, error)) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` as others reach it; a wildcard is this machine's name."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def published(address: str, path: Path | None) -> Iterator[None]:
    """Keep `address` in the file at `path` while the block lasts; whoever finds the file finds all of it.

    Raises:
        ConfigError: It cannot be written.
    """
    if path is None:
        yield
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(address + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"server.address_file={path} cannot be written: {error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == address:  # else another service has taken the file over
                path.unlink()


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"server.port={port} is in use on {host}; stop what listens there, or choose another with server.port=... "
            "(0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"server.port={port} needs privileges on this machine; choose one above 1023 with server.port=..."
    return f"server.host={host} server.port={port}: cannot listen there: {error.strerror}"
