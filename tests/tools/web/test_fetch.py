"""Reading pages: what is shown, and every way it can fail."""

import asyncio
import gzip
import time
import zlib

import pytest
from aiohttp import web

from prorl_gym.handlers.web import EXTRACTION
from prorl_gym.resources.graders import GraderPool

from .kit import Names, fetch, html, kind, only, site, web_tools

ARTICLE = (
    "<nav><a href='/a'>Menu</a></nav><article><h1>Otters</h1><p>Otters hold hands while they sleep. "
    + "They live in rivers. " * 20
    + "See <a href='/more'>more otters</a>.</p></article><script>evil()</script>"
)


def plain(body: bytes, content_type: str = "text/plain; charset=utf-8", **headers: str) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": content_type, **headers})


async def test_a_page_is_read_as_text_with_its_title_and_whole_links() -> None:
    async with site({"/otters": html(ARTICLE)}) as outer, web_tools(rule=only(outer.port)) as tools:
        reply = await fetch(tools, outer.url("/otters#section"))
    assert kind(reply) is None
    assert reply.text.startswith("A title\n\n# Otters")
    assert "Otters hold hands" in reply.text
    assert f"[more otters]({outer.url('/more')})" in reply.text
    assert "evil" not in reply.text
    assert reply.duration_s > 0


TEXTS = [
    (plain("naïve café".encode("latin-1"), "text/plain; charset=latin-1"), "naïve café"),
    (plain("naïve café".encode()), "naïve café"),
    (plain(b"caf\xe9 au lait", "text/plain"), "caf\ufffd au lait"),
    (plain(b"plain", "text/plain; charset=no-such-charset"), "plain"),
    (plain(b"plain", "text/plain; charset=hex"), "plain"),
    (plain(b'{"a": 1}', "application/json"), '{"a": 1}'),
    (plain(b"<p>Without a type</p>", ""), "Without a type"),
    (plain(b"Without a tag", ""), "Without a tag"),
    (plain(gzip.compress(b"packed"), **{"Content-Encoding": "gzip"}), "packed"),
    (plain(gzip.compress(b"packed ") + gzip.compress(b"twice"), **{"Content-Encoding": "gzip"}), "packed twice"),
    (plain(zlib.compress(b"packed"), **{"Content-Encoding": "deflate"}), "packed"),
    (plain(zlib.compress(b"packed", wbits=-15), **{"Content-Encoding": "deflate"}), "packed"),
    (html("<p>Short.</p>", title=""), "Short."),
]


async def test_texts_are_decoded_as_their_servers_say_where_that_is_true() -> None:
    pages = {f"/{number}": page for number, (page, _) in enumerate(TEXTS)}
    async with site(pages) as outer, web_tools(rule=only(outer.port)) as tools:
        replies = [await fetch(tools, outer.url(path)) for path in pages]
    assert [(kind(reply), reply.text) for reply in replies] == [(None, text) for _, text in TEXTS]


async def test_a_redirect_is_followed() -> None:
    away = web.Response(status=301, headers={"Location": "new?q=1"})
    async with site({"/old": away, "/new": plain(b"moved")}) as outer, web_tools(rule=only(outer.port)) as tools:
        reply = await fetch(tools, outer.url("/old"))
    assert reply.text == "moved"
    assert outer.asked == ["/old", "/new?q=1"]


async def test_a_long_text_comes_in_parts() -> None:
    text = "".join(f"{number:05}" for number in range(200))
    async with (
        site({"/": plain(text.encode())}) as outer,
        web_tools(rule=only(outer.port), page_characters=600) as tools,
    ):
        first = await fetch(tools, outer.url("/"))
        second = await fetch(tools, outer.url("/"), start=600)
        beyond = await fetch(tools, outer.url("/"), start=1000)
    assert first.text == f"{text[:600]}\n[characters 0 to 600 of 1000; call again with start=600 for more]"
    assert second.text == text[600:]
    assert (kind(beyond), "only 1000 characters" in beyond.text) == ("bad_request", True)


async def test_what_is_fetched_is_bounded_also_when_it_is_packed() -> None:
    bomb = gzip.compress(b"a" * (200 << 20), compresslevel=1)
    packed = plain(bomb, **{"Content-Encoding": "gzip"})
    async with (
        site({"/bomb": packed, "/long": plain(b"b" * 5000)}) as outer,
        web_tools(rule=only(outer.port), max_page_bytes=2000, page_characters=10_000) as tools,
    ):
        replies = [await fetch(tools, outer.url(path)) for path in ("/bomb", "/long")]
    notice = "\n[the page is longer than what is fetched of one]"
    assert [reply.text for reply in replies] == ["a" * 2000 + notice, "b" * 2000 + notice]


async def test_a_long_list_is_read_well_within_the_time_of_a_page() -> None:
    items = "".join(
        f"<li><a href='/{number}'>Item {number * 7919}</a> by author {number}</li>" for number in range(12_000)
    )
    async with site({"/": html(f"<ul>{items}</ul>")}) as outer, web_tools(rule=only(outer.port)) as tools:
        reply = await fetch(tools, outer.url("/"))
    assert kind(reply) is None
    assert "Item 7919\nby author 1\n" in reply.text
    assert "call again with start=20000 for more" in reply.text


@pytest.mark.parametrize(
    ("page", "failure", "words"),
    [
        (web.Response(status=404), "http", "status 404"),
        (web.Response(status=200, headers={"Content-Type": "application/pdf"}, body=b"%PDF"), "unreadable", "pdf"),
        (html("<script>app()</script>", title=""), "unreadable", "JavaScript"),
        (plain(b""), "unreadable", "no text"),
        (plain(b"x", **{"Content-Encoding": "br"}), "unreadable", "compressed"),
        (plain(b"not packed at all", **{"Content-Encoding": "gzip"}), "http", "no proper answer"),
        (web.Response(status=302, headers={"Location": "/"}), "http", "more than 5 times"),
        (web.Response(status=403, headers={"cf-mitigated": "challenge"}, body=b"Just a moment"), "captcha", "human"),
        (web.Response(status=403, body=b"<div class='g-recaptcha'></div>"), "captcha", "human"),
        (html("<p>Please verify you are human</p><div class='h-captcha'></div>"), "captcha", "human"),
    ],
)
async def test_a_page_that_cannot_be_read_says_why_and_is_asked_for_once(
    page: web.Response, failure: str, words: str
) -> None:
    async with site({"/": page}) as outer, web_tools(rule=only(outer.port)) as tools:
        reply = await fetch(tools, outer.url("/"))
    assert (kind(reply), words in reply.text, reply.text[:18]) == (failure, True, "web_fetch failed: ")
    assert len(outer.asked) == (6 if "5 times" in words else 1)


async def test_a_real_page_that_embeds_a_captcha_is_a_page() -> None:
    page = html(ARTICLE + "<p>" + "More of the text. " * 40 + "</p><div class='g-recaptcha'></div>")
    async with site({"/": page}) as outer, web_tools(rule=only(outer.port)) as tools:
        assert kind(await fetch(tools, outer.url("/"))) is None


@pytest.mark.parametrize(("status", "failure"), [(429, "rate_limit"), (503, "http")])
async def test_what_may_pass_is_tried_again_a_bounded_number_of_times(
    status: int, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_gym.tools.web.tools.BACKOFF_S", 0.01)
    async with (
        site({"/": web.Response(status=status)}) as outer,
        web_tools(rule=only(outer.port), attempts=3) as tools,
    ):
        reply = await fetch(tools, outer.url("/"))
    assert (kind(reply), len(outer.asked)) == (failure, 3)


async def test_a_page_that_comes_back_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.tools.web.tools.BACKOFF_S", 0.01)
    answers = [web.Response(status=429), web.Response(status=502), web.Response(text="back again")]

    async def next_answer(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with site({"/": next_answer}) as outer, web_tools(rule=only(outer.port)) as tools:
        assert (await fetch(tools, outer.url("/"))).text == "back again"


async def test_nobody_waits_for_a_server_that_asks_for_more_time_than_there_is() -> None:
    busy = web.Response(status=429, headers={"Retry-After": "3600"})
    began = time.monotonic()
    async with site({"/": busy}) as outer, web_tools(rule=only(outer.port)) as tools:
        reply = await fetch(tools, outer.url("/"))
    assert (kind(reply), len(outer.asked)) == ("rate_limit", 1)
    assert time.monotonic() - began < 10


async def test_a_server_that_drips_or_never_answers_runs_into_the_limit() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.01)

    async with (
        site({"/hang": hang, "/drip": drip}) as outer,
        web_tools(rule=only(outer.port), fetch_timeout_s=0.3) as tools,
    ):
        replies = [await fetch(tools, outer.url(path)) for path in ("/hang", "/drip")]
    assert [(kind(reply), reply.timed_out) for reply in replies] == [("timeout", True)] * 2


async def test_hosts_that_are_not_there_or_speak_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.tools.web.tools.BACKOFF_S", 0.01)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n") if talk_http else await reader.read(10)
        writer.write(b"220 smtp.example ready\r\n")
        writer.close()

    talk_http = True
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, web_tools(rule=only(port, 1), resolver=Names()) as tools:
        unknown = await fetch(tools, "http://no-such-host.example/")
        closed = await fetch(tools, "http://127.0.0.1:1/")
        smtp = await fetch(tools, f"http://127.0.0.1:{port}/")
        talk_http = False
        tls = await fetch(tools, f"https://127.0.0.1:{port}/")
    assert [kind(reply) for reply in (unknown, closed, tls)] == ["unreachable"] * 3
    assert kind(smtp) in {"http", "unreachable"}
    assert "127.0.0.1:1/" not in closed.text


@pytest.mark.parametrize(
    "url",
    [
        *("", "otters", "ftp://host/x", "file:///etc/passwd", "http://", "http://h:99999/", "http://u:p@h/", "//h/x"),
        *("http://" + "a" * 5000, "http://[::1", "http://a b/", "http://exa\u2028mple/", "data:text/plain,x"),
    ],
)
async def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    async with web_tools(resolver=Names()) as tools:
        reply = await fetch(tools, url)
    assert kind(reply) in {"bad_address", "unreachable"}


async def test_nothing_of_this_host_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    cookie = web.Response(text="x", headers={"Set-Cookie": "session=1; Path=/"})
    async with site({"/": cookie}) as outer, web_tools(rule=only(outer.port)) as tools:
        assert (await fetch(tools, outer.url("/"))).text == "x"
        assert (await fetch(tools, outer.url("/"))).text == "x"
    assert not {"Cookie", "Authorization"} & set(outer.headers)


async def test_a_page_that_breaks_its_reader_costs_no_other_page() -> None:
    async with (
        site({"/": html("<b><table><tr><td>" * 40_000), "/next": plain(b"next")}) as outer,
        web_tools(rule=only(outer.port), fetch_timeout_s=5) as tools,
    ):
        hostile = await fetch(tools, outer.url("/"))
        after = await fetch(tools, outer.url("/next"))
    assert kind(hostile) in {"unreadable", "timeout"}
    assert after.text == "next"


async def test_a_cancelled_call_closes_its_connection() -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, web_tools(rule=only(port)) as tools:
        call = asyncio.create_task(fetch(tools, f"http://127.0.0.1:{port}/"))
        await asyncio.wait_for(asked.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(gone.wait(), 5)


async def test_after_a_stop_calls_fail_and_after_a_start_they_work() -> None:
    async with (
        site({"/": plain(b"x")}) as outer,
        web_tools(rule=only(outer.port), attempts=1, reader=GraderPool(EXTRACTION, None, workers=1)) as tools,
    ):
        await tools.stop()
        stopped = await fetch(tools, outer.url("/"))
        await tools.start()
        assert (await fetch(tools, outer.url("/"))).text == "x"
    assert kind(stopped) == "unreachable"
