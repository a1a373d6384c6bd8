"""The text of a page. Loaded by path into a worker process: pages are hostile ground, down to their charset.

Stands alone: nothing of the package is visible in there.
"""

import base64
from typing import Any

import trafilatura
from trafilatura.utils import decode_file

LARGE_CHARACTERS = 200_000
"""A page with more is read in the quick way: the thorough one takes quadratic time on long lists."""


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Read `body` (base64), which its server says is in `charset`, as found at `url`; HTML becomes Markdown."""
    body = base64.b64decode(request["body"])
    text = _decoded(body, request.get("charset"))
    if not request["html"]:
        return {"title": "", "text": _sound(text if text is not None else body.decode("utf-8", "replace"))}
    page = decode_file(body) if text is None else text
    tree = trafilatura.load_html(page)
    if tree is None or tree.tag != "html":  # a mere fragment, which the library leaves alone
        page = f"<html><body>{page}</body></html>"
        tree = trafilatura.load_html(page)
    if tree is None:
        return {"title": "", "text": ""}
    title = " ".join((tree.findtext(".//title") or "").split())
    large = len(page) > LARGE_CHARACTERS
    found = trafilatura.extract(
        page,
        url=request["url"],
        output_format="markdown",
        include_links=True,
        include_tables=True,
        favor_recall=not large,
        fast=large,
    )
    return {"title": _sound(title[:300]), "text": _sound(found or trafilatura.html2txt(page) or "")}


def _decoded(body: bytes, charset: str | None) -> str | None:
    """As the server says, or None where it says nothing that is true."""
    if not charset:
        return None
    try:
        return body.decode(charset, "replace")
    except (LookupError, ValueError):
        return None


def _sound(text: str) -> str:
    """Without lone surrogates."""
    return text.encode("utf-8", "replace").decode().strip()
