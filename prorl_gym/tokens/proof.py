"""Proves, on probe conversations, that a renderer writes what the model's template writes, and grows by appending."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from prorl_gym.errors import ConfigError
from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.bridge import BridgingRenderer
from prorl_gym.tokens.chat_template import ChatTemplate, TemplateRefusal
from prorl_gym.tokens.layout import Layout
from prorl_gym.tokens.library import LibraryRenderer
from prorl_gym.tokens.records import ChatMessage, ToolRequest
from prorl_gym.tokens.template import TemplateRenderer
from prorl_gym.tokens.toolcalls import parse_calls

Reference = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool | None], list[int]]
"""The tokenizer's own rendering: `reference(messages, tools, enable_thinking)`, generation prompt included."""

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'Do "{name}".',
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
    for name in ("bash", "submit")
]
_ODD = " two\n\nlines, é \U0001f600 {{ x }} {% y %} \n"
_SYSTEM = ChatMessage("system", "Be brief.")
_ASK = ChatMessage("user", "What now?")
_ODDLY = ChatMessage("user", _ODD)
_SAY = ChatMessage("assistant", "An answer.")


def _call(content: str, *texts: str) -> ChatMessage:
    requests = tuple(ToolRequest(f"call_0_{i}", "bash", {"text": text}) for i, text in enumerate(texts))
    return ChatMessage("assistant", content, tool_requests=requests)


def _result(index: int, content: str) -> ChatMessage:
    return ChatMessage("tool", content, tool_call_id=f"call_0_{index}", name="bash")


Turn = tuple[ChatMessage, tuple[ChatMessage, ...]]
"""What an assistant said, and what came after it."""
_TURNS: tuple[Turn, ...] = (
    (_SAY, (_ASK,)),
    (_SAY, (_ODDLY,)),
)
_TOOL_TURNS: tuple[Turn, ...] = (
    (_call("", "ls"), (_result(0, "a\nb\n"),)),
    (_call("Both.", "ls", 'say "hi"\\n'), (_result(0, ""), _result(1, _ODD))),
    (_call("", "x"), (_result(0, "done"), _ASK)),
)


def make_template_renderer(
    vocabulary: Vocabulary,
    template: ChatTemplate,
    *,
    calls: Literal["auto", "hermes", "fenced"] = "auto",
    stop_token_ids: Sequence[int] = (),
    keep_thinking: bool = False,
    reference: Reference | None = None,
) -> TemplateRenderer:
    """A proven renderer: with the template's own tools where they are written the Hermes way, else with tools as text.

    Args:
        vocabulary: Of the model's tokenizer.
        template: The model's own.
        calls: `fenced` asks for fenced calls, which no template knows; `auto` is `hermes`.
        stop_token_ids: Ids that end a turn, beside the template's own end-of-turn token.
        keep_thinking: Keep past reasoning in the prompt where the template would strip it.
        reference: What rendered prompts must equal id for id; None when there is nothing to compare with.

    Raises:
        ConfigError: In no layout could the template be proven; it says what differed.
    """
    failures = []
    for layout in _layouts(template, "fenced" if calls == "fenced" else "hermes"):
        try:
            renderer = TemplateRenderer(
                vocabulary, template, layout, stop_token_ids=stop_token_ids, keep_thinking=keep_thinking
            )
            _prove(renderer, reference)
        except TemplateRefusal as refusal:
            failures.append(f"tools as {layout.tools}: {refusal}")
        else:
            return renderer
    raise ConfigError(
        "policy.model: its chat template cannot be proven to grow by appending, so token-exact rollouts are not "
        f"possible ({'; '.join(dict.fromkeys(failures))}). Choose another policy.renderer, or give policy."
        "tokenizer a folder whose chat_template keeps earlier messages as they are."
    )


def make_library_renderer(
    family: str,
    tokenizer: Any,
    vocabulary: Vocabulary,
    *,
    stop_token_ids: Sequence[int] = (),
    keep_thinking: bool = False,
    reference: Reference,
) -> LibraryRenderer:
    """A renderer of the `renderers` library, proven for this tokenizer and template.

    Args:
        family: One of `library.known_families`.
        tokenizer: The model's own, of transformers.
        vocabulary: Of the same tokenizer.
        stop_token_ids: Ids that end a turn, beside the family's own.
        keep_thinking: Keep past reasoning in the prompt where the template would strip it.
        reference: What rendered prompts must equal id for id.

    Raises:
        TemplateRefusal: It is another family, or a template of its own; says what differed.
    """
    renderer = LibraryRenderer(
        family, tokenizer, vocabulary, stop_token_ids=stop_token_ids, keep_thinking=keep_thinking
    )
    _prove_bodies(renderer)
    for opening, tools, turns in _probes():
        _prove_ids(renderer, opening, tools, reference)
        for said, new in turns:
            if _can_say(reference, renderer.layout.messages([*opening, said, *new], tools, None), tools):
                _prove_ids(renderer, [*opening, said, *new], tools, reference)
                _prove_appending(renderer, [*opening, said], new, tools)
    return renderer


def _can_say(reference: Reference, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    """Whether the tokenizer's own template has words for a conversation at all."""
    try:
        reference(messages, tools, None)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return False
    return True


def _probes() -> Iterator[tuple[list[ChatMessage], list[dict[str, Any]], tuple[Turn, ...]]]:
    """First messages, tools, and what may come after them."""
    for opening in ([_ASK], [_ODDLY], [_SYSTEM, _ASK]):
        yield opening, [], _TURNS
        yield opening, _TOOLS, (*_TURNS, *_TOOL_TURNS)


def _layouts(template: ChatTemplate, calls: Literal["hermes", "fenced"]) -> Iterator[Layout]:
    """Every layout worth trying, the template's own tools first."""
    user = {"role": "user", "content": "x"}
    thought = [user, {"role": "assistant", "content": "x", "reasoning_content": "\ufdd3"}]
    native = Layout(
        "native",
        calls,
        reasoning="field" if "\ufdd3" in _render(template, thought) else "inline",
        system="\ufdd3" in _render(template, [{"role": "system", "content": "\ufdd3"}, user]),
    )
    ways: list[Literal["native", "text"]] = ["native", "text"] if calls == "hermes" else ["text"]
    for tools in ways:
        for alternate in (False, True):
            yield replace(native, tools=tools, alternate=alternate)


def _render(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    try:
        return template.render(messages, generate=False)
    except TemplateRefusal:
        return ""


def _prove(renderer: TemplateRenderer, reference: Reference | None) -> None:
    """Check every probe.

    Raises:
        TemplateRefusal: The first difference found, in words.
    """
    _prove_bodies(renderer)
    for opening, tools, turns in _probes():
        _prove_whole(renderer, opening, tools, reference)
        for said, new in turns:
            history = [*opening, said]
            _prove_step(renderer, history, new, tools)
            _prove_whole(renderer, [*history, *new], tools, reference)
            for again, newer in turns:
                _prove_step(renderer, [*history, *new, again], newer, tools)


def _prove_bodies(renderer: BridgingRenderer) -> None:
    """Control text in bodies stays text, and stays whole."""
    vocabulary = renderer.vocabulary
    control = {token.id for token in vocabulary.control.values()}
    text = " ".join(vocabulary.control)
    harmless, hostile = (renderer.start([ChatMessage("user", body)], _TOOLS).ids for body in ("x", text))
    if [token for token in harmless if token in control] != [token for token in hostile if token in control]:
        raise TemplateRefusal("control text in a message became control tokens")
    if vocabulary.decode(vocabulary.encode(vocabulary.guard(text))) not in vocabulary.decode(hostile):
        raise TemplateRefusal("control text in a message was changed")


def _prove_whole(
    renderer: TemplateRenderer,
    messages: Sequence[ChatMessage],
    tools: list[dict[str, Any]],
    reference: Reference | None,
) -> None:
    """A prompt rendered from scratch is the tokenizer's own, id for id."""
    if reference is not None:
        _prove_ids(renderer, messages, tools, reference)
    else:
        _prove_tools_shown(renderer, renderer.start(messages, tools).ids, tools)


def _prove_ids(
    renderer: TemplateRenderer | LibraryRenderer,
    messages: Sequence[ChatMessage],
    tools: list[dict[str, Any]],
    reference: Reference,
) -> None:
    ids = renderer.start(messages, tools).ids
    _prove_tools_shown(renderer, ids, tools)
    layout = renderer.layout
    expected = reference(layout.messages(messages, tools, None), layout.schemas(tools, None), None)
    if ids != expected:
        differing = (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b)
        at = next(differing, min(len(ids), len(expected)))
        ours, theirs = (renderer.vocabulary.decode(side[max(at - 3, 0) : at + 5]) for side in (ids, expected))
        raise TemplateRefusal(f"{_roles(messages)}: at token {at} ours is {ours!r}, the tokenizer's {theirs!r}")


def _prove_tools_shown(renderer: BridgingRenderer, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> None:
    text = renderer.vocabulary.decode(ids) if tools else ""
    if tools and any(name not in text for name in ("bash", "submit", "required")):
        raise TemplateRefusal("it does not show the model its tools")


def _prove_appending(
    renderer: LibraryRenderer, history: list[ChatMessage], new: Sequence[ChatMessage], tools: list[dict[str, Any]]
) -> None:
    """A longer conversation is the shorter one, what was said, and the addition; what was said can be read."""
    where = _roles([*history, *new])
    prompt, _ = renderer.whole(history[:-1], tools, None)
    whole, _ = renderer.whole([*history, *new], tools, None)
    added, _ = renderer.addition(new, tools, None)
    if whole[: len(prompt)] != prompt:
        raise TemplateRefusal(f"{where}: later messages change how earlier ones are written")
    if whole[len(whole) - len(added) :] != added:
        ours = renderer.vocabulary.decode(added)
        raise TemplateRefusal(f"{where}: the end is not {ours!r}, which the same messages add elsewhere")
    said = [*whole[len(prompt) : len(whole) - len(added)], renderer.close_id or 0]
    message = renderer.parse(said, prompt, turn=0).message
    written, meant = ([(call.name, call.arguments) for call in m.tool_requests] for m in (message, history[-1]))
    if written != meant:
        raise TemplateRefusal(f"{where}: the calls {meant!r} are read back as {written!r}")


def _prove_step(
    renderer: TemplateRenderer, history: list[ChatMessage], new: Sequence[ChatMessage], tools: list[dict[str, Any]]
) -> None:
    """The template writes a longer conversation as the shorter one, what was said, and the difference."""
    where = _roles([*history, *new])
    before = renderer.text(history[:-1], tools, generate=False)
    whole = renderer.text([*history, *new], tools)
    difference = renderer.difference(new, tools)
    if not whole.startswith(before):
        raise TemplateRefusal(f"{where}: later messages change how earlier ones are written")
    if not whole.endswith(difference):
        raise TemplateRefusal(f"{where}: the end is not {difference!r}, which the same messages add elsewhere")
    said = whole[len(before) : len(whole) - len(difference)]
    prompt = renderer.generation_prompt()
    if not said.startswith(prompt) and "<think>" not in prompt:
        raise TemplateRefusal(f"{where}: an answer begins with {said[: len(prompt)]!r} instead of {prompt!r}")
    written = parse_calls(said, renderer.layout.calls, complete=True, turn=0).requests
    meant = history[-1].tool_requests
    if [(call.name, call.arguments) for call in written] != [(call.name, call.arguments) for call in meant]:
        raise TemplateRefusal(f"{where}: calls are not written as {renderer.layout.calls} calls but as {said!r}")


def _roles(messages: Sequence[ChatMessage]) -> str:
    return " ".join(message.role for message in messages)
