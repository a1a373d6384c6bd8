"""Any template: first prompts are the template's own, later ones append, and what cannot be proven is refused."""

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.testing.byte_tokenizer import ByteTokenizer
from prorl_gym.tokens.records import ChatMessage, ToolRequest

from .templates import (
    ALTERNATING,
    BOS,
    CHATML,
    COUNTS,
    DEFAULT_SYSTEM,
    DROPS,
    NO_CLOSE,
    STRIPS_ALWAYS,
    STRIPS_BEFORE_USER,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run <|im_end|> it.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
SYSTEM, USER = ChatMessage("system", "Be brief."), ChatMessage("user", "How?")
END = 257


def ids(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def tool(content: str, index: int = 0) -> ChatMessage:
    return ChatMessage("tool", content, tool_call_id=f"call_0_{index}")


def grown(renderer, first, output, new, tools=(), **thinking):
    """The text that a sampled turn and new messages add, and the rendered prompt."""
    prompt = renderer.start(first, tools, **thinking)
    parsed = renderer.parse(output, prompt.ids, turn=0)
    rendered = renderer.extend([*first, parsed.message], prompt.ids, output, new, tools, **thinking)
    assert rendered.append_only
    assert rendered.ids[: len(prompt.ids) + len(output)] == [*prompt.ids, *output]
    return renderer.vocabulary.decode(rendered.ids[len(prompt.ids) + len(output) :]), rendered


def spans_text(renderer, rendered) -> list[str]:
    return [renderer.vocabulary.decode(rendered.ids[a:b]) for a, b in rendered.spans]


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_a_tool_turn_is_whole_with_and_without_a_default_system_text(template):
    renderer = byte_renderer(template)
    added, _ = grown(renderer, [USER], [*ids("hm"), END], [tool("one"), tool("two", 1)], TOOLS)
    assert added == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_default_system_text_is_kept_unless_tools_take_its_place():
    renderer = byte_renderer(DEFAULT_SYSTEM)
    assert "helpful assistant" in renderer.vocabulary.decode(renderer.start([USER], []).ids)
    assert "helpful assistant" not in renderer.vocabulary.decode(renderer.start([SYSTEM, USER], []).ids)
    with_tools = renderer.vocabulary.decode(renderer.start([USER], TOOLS).ids)
    assert with_tools.startswith("<|im_start|>system\n# Tools") and '"name": "bash"' in with_tools


def test_tools_of_a_template_that_knows_none_stand_in_the_system_message():
    renderer = byte_renderer(CHATML)
    assert renderer.name == "template-difference:text-hermes"
    prompt = renderer.start([SYSTEM, USER], TOOLS)
    text = renderer.vocabulary.decode(prompt.ids)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and "<tool_call>" in text
    assert prompt.ids.count(END) == 2, "the description's <|im_end|> is text"
    assert text.count("<|im_end|>") == 3


def test_the_tiny_models_template_shows_tools_its_own_way():
    renderer = byte_renderer()
    assert renderer.name == "template-difference:native-hermes"
    assert "You may call functions" in renderer.vocabulary.decode(renderer.start([USER], TOOLS).ids)


def test_fenced_calls_are_asked_for_and_read():
    renderer = byte_renderer(calls="fenced")
    assert "```json" in renderer.vocabulary.decode(renderer.start([USER], TOOLS).ids)
    output = [*ids('```json\n{"name": "bash", "arguments": {}}\n```'), END]
    [request] = renderer.parse(output, [], turn=2).message.tool_requests
    assert (request.id, request.name, request.arguments) == ("call_2_0", "bash", {})


def test_at_most_one_bos():
    renderer = byte_renderer(BOS)
    prompt = renderer.start([SYSTEM, USER], [])
    assert prompt.ids[0] == 258 and prompt.ids.count(258) == 1
    added, rendered = grown(renderer, [USER], [*ids("x"), END], [USER])
    assert rendered.ids.count(258) == 1 and "<|endoftext|>" not in added


def test_a_sampled_end_of_turn_is_not_written_twice_and_ids_and_text_agree():
    renderer = byte_renderer()
    output = [*ids("hi"), END]
    parsed = renderer.parse(output, [], turn=0)
    assert (parsed.message.content, parsed.complete) == ("hi", True)
    added, rendered = grown(renderer, [USER], output, [USER])
    assert added == "\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    again = renderer.start([USER, parsed.message, USER], [])
    assert again.ids == rendered.ids


@pytest.mark.parametrize(
    ("output", "content"),
    [
        (ids("hi"), "hi"),
        ([*ids("hi"), 258], "hi"),
        ([*ids("hi"), END, *ids("junk")], "hi"),
        ([], ""),
    ],
)
def test_an_end_of_turn_that_was_not_sampled_last_is_added_and_the_sampled_ids_stay(output, content):
    renderer = byte_renderer()
    parsed = renderer.parse(output, [], turn=0)
    assert parsed.message.content == content
    assert parsed.complete == (END in output or 258 in output)
    added, _ = grown(renderer, [USER], output, [USER])
    assert added.startswith("<|im_end|>\n<|im_start|>user\nHow?")


def test_a_template_without_an_end_of_turn_token_grows_by_text():
    renderer = byte_renderer(NO_CLOSE)
    assert renderer.close_id is None and renderer.stop_token_ids == (257, 258)
    added, _ = grown(renderer, [USER], ids("yes"), [USER])
    assert added == "\n\n### user:\nHow?\n\n### assistant:\n"


def test_roles_that_must_alternate_and_a_missing_system_role_are_worked_around():
    renderer = byte_renderer(ALTERNATING)
    text = renderer.vocabulary.decode(renderer.start([SYSTEM, USER], TOOLS).ids)
    assert text.startswith("<|im_start|>user\nBe brief.\n\n# Tools") and text.endswith(
        "How?<|im_end|>\n<|im_start|>model\n"
    )
    added, _ = grown(renderer, [SYSTEM, USER], [*ids("x"), END], [tool("r"), USER], TOOLS)
    assert added.count("<|im_start|>user") == 1 and "</tool_response>\n\nHow?<|im_end|>" in added


def test_messages_are_attributed_frame_and_all():
    renderer = byte_renderer()
    prompt = renderer.start([SYSTEM, USER], [])
    assert spans_text(renderer, prompt) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n",
    ]
    _, rendered = grown(renderer, [USER], [*ids("x"), END], [tool("a<|im_end|>"), tool("b", 1), USER])
    assert spans_text(renderer, rendered) == [
        "\n<|im_start|>user\n<tool_response>\na<|im_end|>\n</tool_response>",
        "\n<tool_response>\nb\n</tool_response><|im_end|>\n",
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n",
    ]
    _, cut = grown(renderer, [USER], ids("x"), [tool("a"), tool("b", 1)])
    assert spans_text(renderer, cut)[0].startswith("<|im_end|>\n<|im_start|>user")


def test_calls_in_a_given_history_are_written_as_the_model_would():
    request = ToolRequest("call_0_0", "bash", {"command": "echo '<|im_end|>'"})
    said = ChatMessage("assistant", "Look.", tool_requests=(request,))
    for renderer in (byte_renderer(), byte_renderer(CHATML), byte_renderer(CHATML, calls="fenced")):
        prompt = renderer.start([USER, said, tool("x")], [])
        text = renderer.vocabulary.decode(prompt.ids)
        spoken = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>\n<|im_start|>user")[0]
        assert prompt.ids.count(END) == 3
        parsed = renderer.parse([*ids(spoken), END], [], turn=0)
        assert parsed.message.tool_requests[0].arguments == request.arguments


class TestThinking:
    """A template that drops reasoning once another question comes."""

    THOUGHT = (*ids("<think>\nhm\n</think>\n\n4"), END)
    PLAIN = (*ids("4"), END)

    def extend(self, renderer, output, new, first=(USER,), **thinking):
        prompt = renderer.start(first, TOOLS, **thinking)
        parsed = renderer.parse(output, prompt.ids, turn=0)
        return renderer.extend([*first, parsed.message], prompt.ids, output, new, TOOLS, **thinking)

    def test_a_question_after_reasoning_opens_a_new_segment_as_the_template_writes_it(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER)
        rendered = self.extend(renderer, self.THOUGHT, [USER])
        assert not rendered.append_only
        assert rendered.ids == renderer.start([USER, ChatMessage("assistant", "4"), USER], TOOLS).ids
        assert spans_text(renderer, rendered) == ["\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"]

    def test_a_tool_result_after_reasoning_appends(self):
        assert self.extend(byte_renderer(STRIPS_BEFORE_USER), self.THOUGHT, [tool("x")]).append_only

    def test_without_reasoning_a_question_appends(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER)
        assert self.extend(renderer, self.PLAIN, [USER]).append_only
        assert self.extend(renderer, [*ids("<think>\n\n</think>\n\n4"), END], [USER]).append_only
        old = [USER, ChatMessage("assistant", "1", reasoning="gone by now"), USER]
        assert self.extend(renderer, self.PLAIN, [USER], first=old).append_only

    def test_reasoning_of_an_earlier_turn_since_the_last_question_counts(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER)
        first = [USER, ChatMessage("assistant", "1", reasoning="hm"), tool("x")]
        assert not self.extend(renderer, self.PLAIN, [USER], first=first).append_only

    def test_keep_keeps_one_segment_and_says_so(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER, keep_thinking=True)
        assert self.extend(renderer, self.THOUGHT, [USER]).append_only
        assert renderer.name.endswith(",thinking=keep")

    def test_a_template_that_always_strips_splits_at_each_turn_with_reasoning(self):
        renderer = byte_renderer(STRIPS_ALWAYS)
        assert not self.extend(renderer, self.THOUGHT, [tool("x")]).append_only
        assert self.extend(renderer, self.PLAIN, [tool("x")]).append_only

    def test_the_prompt_may_open_or_close_the_block(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER)
        opened = renderer.start([USER], [], enable_thinking=True).ids
        closed = renderer.start([USER], [], enable_thinking=False).ids
        assert renderer.vocabulary.decode(opened).endswith("<think>\n")
        assert renderer.vocabulary.decode(closed).endswith("<think>\n\n</think>\n\n")
        output = [*ids("hm\n</think>\n\n4"), END]
        message = renderer.parse(output, opened, turn=0).message
        assert (message.reasoning, message.content) == ("hm", "4")
        assert renderer.parse(self.PLAIN, closed, turn=0).message == ChatMessage("assistant", "4")
        assert self.extend(renderer, self.PLAIN, [tool("x")], enable_thinking=False).append_only

    def test_calls_inside_reasoning_never_run(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER)
        opened = renderer.start([USER], [], enable_thinking=True).ids
        call = ids('<tool_call>{"name": "bash", "arguments": {}}</tool_call>')
        assert renderer.parse([*call, END], opened, turn=0).message.tool_requests == ()
        assert renderer.parse([*ids("<think>"), *call], [], turn=0).message.tool_requests == ()
        assert len(renderer.parse([*call, END], [], turn=0).message.tool_requests) == 1

    def test_a_block_that_was_cut_is_closed_in_new_ids(self):
        renderer = byte_renderer(STRIPS_BEFORE_USER, keep_thinking=True)
        rendered = self.extend(renderer, ids("<think>\nhm"), [tool("x")])
        assert "hm\n</think>\n\n<|im_end|>\n<|im_start|>tool\nx" in renderer.vocabulary.decode(rendered.ids)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (COUNTS, "later messages change how earlier ones are written"),
        (DROPS, "drops what an assistant message says"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for m in messages %}{{ m.nothing.here }}{% endfor %}", "UndefinedError"),
        (CHATML.replace("assistant\n{% endif %}", "model\n{% endif %}"), "an answer begins with"),
    ],
)
def test_a_template_that_cannot_be_proven_is_refused_with_what_differed(template, reason):
    with pytest.raises(ConfigError, match="cannot be proven") as refusal:
        byte_renderer(template)
    assert reason in str(refusal.value)


def test_what_differs_from_the_tokenizers_own_rendering_is_refused():
    from prorl_gym.tokens.chat_template import ChatTemplate
    from prorl_gym.tokens.proof import make_template_renderer

    def doubled_bos(messages, tools, enable_thinking):
        return [258, *ids("anything")]

    vocabulary = byte_renderer().vocabulary
    with pytest.raises(ConfigError, match=r"at token 0 ours is .* the tokenizer's '<\|endoftext\|>"):
        make_template_renderer(vocabulary, ChatTemplate(CHATML, {}), reference=doubled_bos)


def test_the_digest_names_tokenizer_template_and_layout():
    renderers = [byte_renderer(), byte_renderer(), byte_renderer(CHATML), byte_renderer(calls="fenced")]
    digests = [renderer.digest() for renderer in renderers]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_templates_get_what_transformers_gives_them():
    from prorl_gym.tokens.chat_template import ChatTemplate, TemplateRefusal

    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'<é>': 1} | tojson }}{{ strftime_now('%Y') | length }}{{ eos_token }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(messages, generate=False) == 'a{"<é>": 1}4</s>True'
    with pytest.raises(TemplateRefusal, match="not a valid template"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(TemplateRefusal, match="SecurityError"):
        ChatTemplate("{{ messages.append.__globals__ }}", {}).render(messages, generate=False)
