"""One spelling per engine: addresses are compared, logged and joined with paths in their normal form only."""

from urllib.parse import urlsplit

from prorl_gym.errors import RequestError

_MAX_CHARS = 2048


def normalise_address(address: str) -> str:
    """`http://HOST:PORT[/PREFIX]` in lower case where case means nothing, without `/v1` and trailing slashes.

    Raises:
        RequestError: It is no http(s) URL, or carries a user, a query or a fragment. Field `address`.
    """
    text = address.strip()
    if not text or len(text) > _MAX_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        raise _invalid("it is empty, too long, or holds characters that stand in no URL")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _invalid(str(error)) from None
    if parts.scheme not in {"http", "https"}:
        raise _invalid("it starts with neither http:// nor https://")
    if not host or port == 0:
        raise _invalid("it names no host or no usable port")
    if "@" in parts.netloc:
        raise _invalid("it carries a user; name the key's environment variable with api_key_env instead")
    if parts.query or parts.fragment:
        raise _invalid("it carries a query or a fragment")
    host = f"[{host}]" if ":" in host else host
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{prefix}"


def _invalid(reason: str) -> RequestError:
    return RequestError(f"the address is not usable: {reason} (expected http://HOST:PORT)", field="address")
