"""Sandboxes on the host's network have addresses of their own, whoever runs them and however they end."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.errors import RuntimeStartError
from prorl_gym.runtimes import loopback
from prorl_gym.runtimes.loopback import ADDRESS_VARIABLE, ADDRESSES, LoopbackAddresses, nth_address

OWNER = """
import os, sys
from prorl_gym.runtimes.loopback import LoopbackAddresses
first, size, count, uid = map(int, sys.argv[1:])
if uid:
    os.setuid(uid)
addresses = LoopbackAddresses(range(first, first + size))
sys.stdin.readline()
leases = [addresses.lease() for _ in range(count)]
print(*(lease.address for lease in leases), flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(numbers: range, count: int, uid: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that leases `count` addresses when told to, says which, and holds them until it ends."""
    words = [sys.executable, "-c", OWNER, *map(str, (numbers.start, len(numbers), count, uid))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def numbers(size: int) -> range:
    """Somewhere else each time: addresses are the whole machine's, and tests may run beside each other."""
    first = random.randrange(ADDRESSES - size)
    return range(first, first + size)


@contextmanager
def all_leased(addresses: LoopbackAddresses, count: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        leases = []
        for _ in range(count):
            leases.append(addresses.lease())
            stack.callback(leases[-1].release)
        yield [lease.address for lease in leases]


@given(st.integers(0, ADDRESSES - 1), st.integers(0, ADDRESSES - 1))
def test_every_number_is_another_address_of_loopback_that_the_host_does_not_use(one, other):
    address = ip_address(nth_address(one))
    assert address in ip_network("127.0.0.0/8")
    assert address not in ip_network("127.0.0.0/16")
    assert address not in ip_network("127.255.0.0/16")
    assert address.packed[3] not in {0, 255}
    assert (nth_address(one) == nth_address(other)) == (one == other)


def test_the_ends_of_the_range():
    assert (nth_address(0), nth_address(ADDRESSES - 1)) == ("127.1.0.1", "127.254.255.254")


def test_four_processes_at_once_never_share_an_address():
    """A range that they fill to the last address, so that they are in each other's way."""
    with ExitStack() as stack:
        wanted = numbers(512)
        owners = [stack.enter_context(owner(wanted, 128)) for _ in range(4)]
        for process in owners:
            go(process)
        leased = [address for process in owners for address in process.stdout.readline().split()]
        assert len(leased) == 512
        assert set(leased) == set(map(nth_address, wanted))
        with pytest.raises(RuntimeStartError, match="512 were tried and all are leased"):
            LoopbackAddresses(wanted).lease()


def test_a_killed_owner_frees_its_addresses_at_once():
    wanted = numbers(16)
    mine = LoopbackAddresses(wanted)
    with owner(wanted, 16) as process:
        go(process)
        assert len(process.stdout.readline().split()) == 16
        with pytest.raises(RuntimeStartError, match="no loopback address is free"):
            mine.lease()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with all_leased(mine, 16) as leased:
            assert set(leased) == set(map(nth_address, wanted))


def test_services_of_different_users_do_not_collide():
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    wanted = numbers(64)
    with owner(wanted, 40, uid=65534) as process, all_leased(LoopbackAddresses(wanted), 24) as mine:
        go(process)
        theirs = process.stdout.readline().split()
        assert len(theirs) == 40
        assert not set(theirs) & set(mine)


def test_an_address_given_back_is_the_last_to_be_given_out_again():
    addresses = LoopbackAddresses(numbers(50))
    given = []
    for _ in range(100):
        lease = addresses.lease()
        given.append(lease.address)
        lease.release()
        lease.release()
    assert len(set(given[:50])) == 50
    assert given[50:] == given[:50]


def test_a_lease_ends_within_bounds_however_many_are_taken(monkeypatch):
    """As when something takes names as fast as it can: the search stops and says so."""
    monkeypatch.setattr(loopback, "_take", lambda address: None)
    with pytest.raises(RuntimeStartError, match=f"of {ADDRESSES}, 4096 were tried"):
        LoopbackAddresses().lease()


def test_a_host_without_the_addresses_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(loopback, "nth_address", lambda number: "192.0.2.1")
    with pytest.raises(RuntimeStartError, match=r"192\.0\.2\.1 cannot be leased.*127\.0\.0\.0/8 on interface lo"):
        LoopbackAddresses().lease()


def open_port() -> int:
    """8000, unless something of the host has taken it on every address."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", 8000))
        except OSError:
            probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]


async def received(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


SERVER = f"""
import os, socket, threading
server = socket.create_server((os.environ["{ADDRESS_VARIABLE}"], {{port}}))
def answer():
    while True:
        connection = server.accept()[0]
        connection.sendall(b"{{name}}")
        connection.close()
threading.Thread(target=answer, daemon=True).start()
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_eight_sandboxes_serve_one_port_each_on_its_own_address(factory):
    port = open_port()
    boxes = [factory.create(factory.spec(network="host")) for _ in range(8)]
    async with AsyncExitStack() as stack:
        for box in boxes:
            await stack.enter_async_context(box)
        addresses = [box.describe().address for box in boxes]
        assert len(set(addresses)) == 8
        assert "127.0.0.1" not in addresses

        async def serve(number: int) -> None:
            code = SERVER.format(port=port, name=f"box {number}")
            reply = await boxes[number].call("ipython", {"code": code}, timeout_s=60)
            assert not reply.error, reply.text

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(serve(number))
        for number, address in enumerate(addresses):
            assert await received(address, port) == f"box {number}".encode()
        ask = f"exec 3<>/dev/tcp/${ADDRESS_VARIABLE}/{port}; cat <&3"
        replies = [await box.call("bash", {"command": ask}, timeout_s=10) for box in boxes]
        assert [reply.text for reply in replies] == [f"box {number}" for number in range(8)]
    assert [box.describe().address for box in boxes] == [None] * 8


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sandbox_without_the_hosts_network_has_no_address(factory):
    async with factory.create(factory.spec()) as box:
        assert box.describe().address is None
        reply = await box.call("bash", {"command": f"echo ${{{ADDRESS_VARIABLE}-none}}"}, timeout_s=10)
        assert reply.text == "none\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_address_for_the_setup_goes_with_its_network(factory):
    if factory.spec().kind == "local":
        pytest.skip("local sandboxes have the host's network throughout")
    async with factory.create(factory.spec(setup_network="host")) as box:
        show = {"command": f"echo ${{{ADDRESS_VARIABLE}-none}}"}
        assert (await box.call("bash", show, timeout_s=10)).text.strip() == box.describe().address
        await box.seal()
        assert box.describe().address is None
        assert (await box.call("bash", show, timeout_s=10)).text == "none\n"
