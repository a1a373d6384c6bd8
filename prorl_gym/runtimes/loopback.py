"""An address of its own, of the host's loopback, for each sandbox that shares the host's network.

The invariant: no two live leases of one network namespace are the same address, whichever services, users or
containers hold them. A lease is an abstract socket name: names are kept apart per network namespace, as addresses are,
any user may take one, and the kernel frees it at the moment its owner ends, however that happens.
"""

import errno
import math
import secrets
import socket

from prorl_gym.errors import RuntimeStartError

ADDRESS_VARIABLE = "PRORL_SANDBOX_ADDRESS"
"""Where programs in the sandbox find its address."""
ADDRESSES = 254 * 256 * 254
"""127.1.0.1 to 127.254.255.254 without last numbers 0 and 255, which some software takes for a network or a broadcast.

127.0.0.0/16 is left to the host: 127.0.0.1, the resolver's 127.0.0.53, Debian's 127.0.1.1.
"""
_TRIES = 4096
"""Bounds one lease to some 20 ms; of a range that is half free, all are taken once in 2**4096."""


class LoopbackLease:
    """An address that no other live sandbox on this network has."""

    def __init__(self, address: str, name: socket.socket) -> None:
        self.address = address
        self._name = name

    def release(self) -> None:
        """Give it back; harmless twice."""
        self._name.close()


class LoopbackAddresses:
    """Leases addresses; one per service.

    Each goes through the addresses in an order of its own that sandboxes cannot foresee, and comes back to one only
    when all others have had their turn, so that clients of an ended sandbox do not find another in its place.

    Args:
        numbers: Which of the addresses are used; all but in tests.
    """

    def __init__(self, numbers: range = range(ADDRESSES)) -> None:
        self._numbers = numbers
        self._at = secrets.randbelow(len(numbers))
        self._step = 1 + secrets.randbelow(len(numbers))
        while math.gcd(self._step, len(numbers)) != 1:
            self._step = 1 + secrets.randbelow(len(numbers))

    def lease(self) -> LoopbackLease:
        """Take a free address.

        Raises:
            RuntimeStartError: None is free, or this host does not have them.
        """
        tries = min(len(self._numbers), _TRIES)
        for _ in range(tries):
            lease = _take(nth_address(self._numbers[self._at]))
            self._at = (self._at + self._step) % len(self._numbers)
            if lease is not None:
                return lease
        raise RuntimeStartError(
            f"no loopback address is free for another sandbox on the host's network: of {len(self._numbers)}, {tries} "
            "were tried and all are leased; `ss -xap | grep prorl_gym-loopback` shows by whom"
        )


def nth_address(number: int) -> str:
    """One of the addresses, by its number below `ADDRESSES`."""
    network, host = divmod(number, 254)
    second, third = divmod(network, 256)
    return f"127.{second + 1}.{third}.{host + 1}"


def _take(address: str) -> LoopbackLease | None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # does not listen: nothing can be sent to it
    try:
        name.bind(f"\0prorl_gym-loopback-{address}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        name.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RuntimeStartError(
            f"loopback address {address} cannot be leased: {error}; network: host needs 127.0.0.0/8 on interface lo"
        ) from error
    return LoopbackLease(address, name)
