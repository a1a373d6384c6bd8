"""A chat template, run the way transformers runs it but without transformers: conversation in, text out."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(ValueError):
    """The template has no way to say this conversation; the message is its own."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant says, for masks that we know anyway: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Its clock stands still, so a prompt is the same however long the service runs."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: Jinja source.
            special_tokens: `bos_token`, `eos_token` and the like, as text.

        Raises:
            TemplateRefusal: The source is no valid template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = partial(datetime.strftime, datetime.now())
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateRefusal(f"not a valid template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generate: bool,
        enable_thinking: bool | None = None,
    ) -> str:
        """The text of a conversation, with the generation prompt where `generate` is true.

        Raises:
            TemplateRefusal: The template refuses the conversation, or breaks on it.
        """
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=generate,
                **self._special_tokens,
                **thinking,
            )
        except Exception as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
