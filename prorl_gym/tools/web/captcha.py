"""Tells a page that asks whether one is human from the page that was wanted."""

from collections.abc import Mapping

SHORT_CHARACTERS = 800
"""A page with more text than this is a page, whatever widgets it embeds."""
_DENIALS = frozenset({401, 403, 405, 429, 503})
_MARKS = (
    b"/cdn-cgi/challenge-platform",
    b"cf-chl-",
    b"challenges.cloudflare.com",
    b"g-recaptcha",
    b"google.com/recaptcha",
    b"h-captcha",
    b"hcaptcha.com",
    b"captcha-delivery.com",
    b"px-captcha",
    b"awswafcaptcha",
    b"geo.captcha",
    b"/sorry/index",
    b"unusual traffic from your computer",
    b"verify you are human",
    b"verify you are a human",
    b"are you a robot",
    b"checking your browser before",
    b"anomaly-modal",
)
_LOOKED_AT_BYTES = 512 << 10


def asks_for_human(status: int, headers: Mapping[str, str], body: bytes, *, text: str | None = None) -> bool:
    """Whether an answer is a challenge.

    `text` is what could be read of the page, once that is known; without it, a page with status 200 gets the benefit of
    the doubt.
    """
    if headers.get("cf-mitigated", "").lower() == "challenge" or headers.get("x-amzn-waf-action", "").lower() in {
        "captcha",
        "challenge",
    }:
        return True
    if status not in _DENIALS and (text is None or len(text) > SHORT_CHARACTERS):
        return False
    start = body[:_LOOKED_AT_BYTES].lower()
    return any(mark in start for mark in _MARKS)
