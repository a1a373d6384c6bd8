"""Which addresses pages may come from."""

from ipaddress import ip_network

import pytest

from prorl_gym.tools.web.guard import PublicOnly, _is_this_host

from .kit import Names, fetch, html, kind, only, site, web_tools

PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.1.2.3 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.192 192.168.1.1 198.18.0.1 192.0.2.1 224.0.0.1 240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0.0.0.0
64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
64:ff9b:1::1 100::1 2001:0:7f00:1:: 2001:db8::1 2002:7f00:1:: 2002:c0a8:101::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo
fec0::1 ff02::1 3fff::1
""".split()
PUBLIC = "1.1.1.1 93.184.216.34 172.32.0.1 ::ffff:1.1.1.1 2606:4700:4700::1111 64:ff9b::101:101".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert PublicOnly()(address, 443) == "it is not on the public web"


@pytest.mark.parametrize("address", PUBLIC)
def test_the_public_web_is_allowed_on_its_own_ports(address: str) -> None:
    assert PublicOnly()(address, 80) is None
    assert PublicOnly()(address, 443) is None
    assert "port 8006" in (PublicOnly()(address, 8006) or "")


def test_networks_that_the_configuration_blocks_are_refused_in_every_spelling() -> None:
    rule = PublicOnly([ip_network("1.1.0.0/16"), ip_network("2606:4700::/32")])
    assert [bool(rule(address, 443)) for address in PUBLIC] == [True, False, False, True, True, True]


def test_the_host_knows_its_own_addresses() -> None:
    assert _is_this_host(ip_network("127.0.0.1").network_address, 80)
    assert not _is_this_host(ip_network("192.0.2.1").network_address, 80)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f.1",
        "017700000001",
        "0.0.0.0",
        "127.1",
        "[::ffff:127.0.0.1]",
        "[::]",
    ],
)
async def test_the_service_as_it_comes_never_connects_to_loopback(host: str) -> None:
    async with site({"/": html("<p>secret</p>")}) as inner, web_tools(attempts=1) as tools:
        reply = await fetch(tools, f"http://{host}:{inner.port}/")
    assert kind(reply) in {"refused", "bad_address"}
    assert "secret" not in reply.text
    assert inner.asked == []


async def test_a_name_that_resolves_to_a_private_address_is_refused() -> None:
    names = Names(innocent_example=["127.0.0.1"])
    async with site({"/": html("<p>secret</p>")}) as inner, web_tools(resolver=names) as tools:
        reply = await fetch(tools, f"http://innocent.example:{inner.port}/")
    assert (kind(reply), names.asked, inner.asked) == ("refused", ["innocent.example"], [])
    assert reply.text == "web_fetch failed: innocent.example is not fetched: it is not on the public web."


async def test_a_name_that_resolves_to_another_address_the_second_time_is_judged_the_second_time() -> None:
    async with site({}) as outer:
        names = Names(rebinding_example=["127.0.0.1", "127.0.0.2"])
        rule = only(outer.port)
        async with web_tools(rule=rule, resolver=names) as tools:
            first = await fetch(tools, f"http://rebinding.example:{outer.port}/")
            second = await fetch(tools, f"http://rebinding.example:{outer.port}/")
    assert (kind(first), kind(second)) == ("http", "refused")
    assert len(outer.asked) == 1


async def test_no_redirect_leads_past_the_rule() -> None:
    from aiohttp import web

    async with site({"/secret": html("<p>secret</p>")}) as inner:

        async def lead(request: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": request.query["to"]})

        names = Names(outer_example=["127.0.0.1"], inner_example=["127.0.0.1"])
        async with site({"/": lead}) as outer, web_tools(rule=only(outer.port), resolver=names) as tools:
            for target in (
                inner.url("/secret"),
                f"http://inner.example:{inner.port}/secret",
                f"//inner.example:{inner.port}/secret",
                "http://169.254.169.254/latest/meta-data/",
                f"http://[::ffff:127.0.0.1]:{inner.port}/secret",
            ):
                reply = await fetch(tools, f"http://outer.example:{outer.port}/?to={target}")
                assert kind(reply) == "refused", target
            for target in ("file:///etc/passwd", "gopher://x/", "javascript:alert(1)", "http://u:p@inner.example/"):
                reply = await fetch(tools, f"http://outer.example:{outer.port}/?to={target}")
                assert kind(reply) == "bad_address", target
    assert inner.asked == []
    assert len(outer.asked) == 9
