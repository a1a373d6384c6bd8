"""Where pages may come from: the public web, nothing else.

The invariant: the rule is asked about the address that the socket is about to be connected to, after every name has
been resolved. So neither a redirect, nor a name that resolves differently the second time, nor an unusual spelling of
an address gets past it.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from prorl_gym.daemon_thread import in_daemon_thread

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
ConnectRule = Callable[[str, int], str | None]
"""Says of a numeric address and a port why nothing may be fetched from there; None when it may."""

PUBLIC_PORTS = (80, 443)
_NEVER: tuple[Network, ...] = tuple(
    ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's host service, on a public address
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata is in it
        "192.88.99.0/24",  # 6to4 relays
        "64:ff9b:1::/48",  # translation within a site
        "fec0::/10",  # site-local
        "5f00::/16",  # segment routing
        "3fff::/20",  # documentation
    )
)
"""What `ipaddress` of some Python takes for public. Source: IANA special-purpose registries; Azure documentation."""
_NAT64 = IPv6Network("64:ff9b::/96")


class Refused(OSError):
    """No connection is made to this address."""


@dataclass(frozen=True, slots=True)
class PublicOnly:
    """The rule of the service: public unicast addresses of other hosts, on the ports of the web.

    Attributes:
        blocked: Further networks that nothing is fetched from.
    """

    blocked: Sequence[Network] = ()

    def __call__(self, host: str, port: int) -> str | None:
        """See `ConnectRule`."""
        address = ip_address(host.partition("%")[0])
        if not all(map(self._is_public, _meant(address))):
            return "it is not on the public web"
        if port not in PUBLIC_PORTS:
            return f"its port {port} is not one of {', '.join(map(str, PUBLIC_PORTS))}"
        if _is_this_host(address, port):
            return "it is the host itself"
        return None

    def _is_public(self, address: Address) -> bool:
        plain = address.is_multicast or address.is_unspecified or address.is_loopback or address.is_link_local
        if plain or not address.is_global or (address.is_reserved and address not in _NAT64):
            return False
        return not any(address in network for network in (*_NEVER, *self.blocked))


def guarded_connector(rule: ConnectRule, resolver: AbstractResolver, *, limit: int) -> aiohttp.TCPConnector:
    """A connector that asks `rule` before each connection; no connection serves a second request."""

    def open_socket(info: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        family, kind, protocol, _, peer = info
        refusal = rule(str(peer[0]), int(peer[1]))
        if refusal is not None:
            raise Refused(refusal)
        return socket.socket(family, kind, protocol)

    return aiohttp.TCPConnector(
        resolver=resolver, socket_factory=open_socket, limit=limit, force_close=True, use_dns_cache=False
    )


class SystemResolver(AbstractResolver):
    """The host's own resolver. A name whose servers never answer holds up no other part of the service."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Every address of `host`.

        Raises:
            OSError: There is none.
        """
        found = await in_daemon_thread(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        return [
            ResolveResult(
                hostname=host, host=str(peer[0]), port=port, family=kin, proto=protocol, flags=socket.AI_NUMERICHOST
            )
            for kin, _, protocol, _, peer in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


def _meant(address: Address) -> Iterator[Address]:
    """The address itself, or those that it stands for when it carries IPv4 inside."""
    if isinstance(address, IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    else:
        yield address
        if address in _NAT64:
            yield IPv4Address(int(address) & 0xFFFFFFFF)
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo


def _is_this_host(address: Address, port: int) -> bool:
    """True for an address of this host: the kernel would talk to it from the same address. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), port))
            return ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # no route: connecting will say so
