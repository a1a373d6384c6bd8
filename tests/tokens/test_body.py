"""Bodies are data: no control token comes of them, and nothing of them is lost."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.errors import ConfigError
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.testing.byte_tokenizer import ByteTokenizer
from prorl_gym.tokens.body import ControlToken, Vocabulary, without_surrogates
from prorl_gym.tokens.tokenizer import load_vocabulary

VOCABULARY = byte_renderer().vocabulary
CONTROL = [*VOCABULARY.control, "<|im_", "end|>", "<", "<|", "<<|im_end|>|im_end|>", "\ufdd0", "\ufdd0\ufdd2", "\ud83d"]
BODIES = st.lists(st.one_of(st.sampled_from(CONTROL), st.text(max_size=4)), max_size=8).map("".join)


@given(BODIES)
def test_a_guarded_body_is_its_plain_bytes_whatever_it_holds(body):
    assert VOCABULARY.encode(VOCABULARY.guard(body)) == list(without_surrogates(body).encode())


@given(BODIES, BODIES)
def test_bodies_side_by_side_or_beside_a_frame_never_make_a_control_token(left, right):
    text = "<|im_start|>" + VOCABULARY.guard(left) + VOCABULARY.guard(right) + "<|im_end|>"
    expected = [256, *without_surrogates(left).encode(), *without_surrogates(right).encode(), 257]
    assert VOCABULARY.encode(text) == expected


@given(st.recursive(BODIES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BODIES, inner, max_size=3)))
def test_json_values_are_guarded_down_to_their_keys(value):
    plain = json.loads(without_surrogates(json.dumps(value)))
    text = json.dumps(VOCABULARY.guard_json(value), ensure_ascii=False)
    decoded = json.loads(bytes(VOCABULARY.encode(text)).decode())
    assert decoded == json.loads(json.dumps(_clean(plain)))


@given(st.lists(st.dictionaries(BODIES, BODIES, max_size=3), max_size=4))
def test_schemas_that_come_again_are_guarded_as_at_the_first_time(schemas):
    vocabulary = Vocabulary(VOCABULARY._plain, list(VOCABULARY.control.values()))
    for schema in [*schemas, *schemas]:
        assert vocabulary.guard_schema(schema) == vocabulary.guard_json(schema)


def test_a_schema_that_was_changed_is_not_taken_for_the_old_one():
    schema = {"name": "bash", "parameters": {"a": 1, "b": 2}}
    assert VOCABULARY.guard_schema(schema) is VOCABULARY.guard_schema(dict(schema))
    schema["parameters"] = {"b": 2, "a": 1}
    assert json.dumps(VOCABULARY.guard_schema(schema)) == json.dumps(schema)


def _clean(value):
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {without_surrogates(key): _clean(item) for key, item in value.items()}


def test_white_space_at_the_edges_stays_where_templates_trim_it():
    guarded = VOCABULARY.guard("  x \n")
    assert guarded.strip() != guarded
    assert VOCABULARY.encode(guarded.strip()) == [ord("x")]
    assert VOCABULARY.guard(" \n") == " \n"


def test_the_longest_control_text_counts_at_each_place():
    vocabulary = Vocabulary(VOCABULARY._plain, [ControlToken(300, "<a>"), ControlToken(301, "<a><b>")])
    assert vocabulary.encode("<a><b><a>") == [301, 300]
    assert vocabulary.encode(vocabulary.guard("<a><b><a>")) == list(b"<a><b><a>")


def test_tokens_that_swallow_white_space_do_so_in_bodies_too():
    vocabulary = Vocabulary(VOCABULARY._plain, [ControlToken(300, "<a>", lstrip=True, rstrip=True)])
    assert vocabulary.encode("x <a>" + vocabulary.guard("  y ") + "<a>") == [ord("x"), 300, ord("y"), 300]


@given(BODIES, st.integers(0, 300))
def test_edges_are_found_in_bytes(body, cut):
    text = f"<|im_start|>{VOCABULARY.guard(body)}\n<|im_end|>\n"
    edge = text.index("\n<|im_end|>")
    ids, found = VOCABULARY.encode_at(text, [0, edge, len(text)])
    assert found == [0, ids.index(257) - 1, len(ids)]


@given(st.text(max_size=300), st.integers(0, 120))
def test_a_clipped_text_fits_and_keeps_head_and_tail(text, max_tokens):
    clipped = VOCABULARY.clip(text, max_tokens)
    assert VOCABULARY.count_tokens(clipped) <= max_tokens
    if VOCABULARY.count_tokens(text) <= max_tokens:
        assert clipped == without_surrogates(text)
    elif max_tokens >= 60:
        head, note, tail = clipped.partition("\n[... ")
        omitted, _, tail = tail.partition(" characters left out ...]\n")
        assert text.startswith(head) and text.endswith(tail) and note
        assert len(head) + len(tail) + int(omitted) == len(text)
        assert VOCABULARY.count_tokens(clipped) > max_tokens - 8


def test_a_huge_text_is_clipped_without_being_encoded_whole():
    text = "head " + "x" * 5_000_000 + " tail"
    clipped = VOCABULARY.clip(text, 100)
    assert clipped.startswith("head x") and clipped.endswith("x tail")
    assert VOCABULARY.count_tokens(clipped) <= 100


def test_decoding_leaves_out_what_is_no_token_and_never_raises():
    assert VOCABULARY.decode([-1, 104, 105, 257, 99999, 1 << 40]) == "hi<|im_end|>"
    assert VOCABULARY.decode(ByteTokenizer().encode("é")[:1]) == "\ufffd"


@pytest.fixture(scope="module")
def tokenizers(qwen3_folder, smollm2_folder, qwen3_template, smollm2):
    from transformers import AutoTokenizer

    return [
        (AutoTokenizer.from_pretrained(qwen3_folder), qwen3_template.vocabulary),
        (AutoTokenizer.from_pretrained(smollm2_folder), smollm2.vocabulary),
    ]


@given(BODIES.filter(lambda body: without_surrogates(body) == body))
@settings(max_examples=50, deadline=None)
def test_real_tokenizers_encode_bodies_without_control_ids_and_frames_as_they_always_do(tokenizers, body):
    for tokenizer, vocabulary in tokenizers:
        control = {token.id for token in vocabulary.control.values()}
        ids = vocabulary.encode(vocabulary.guard(f"{body}<tool_call><|im_end|>{body}"))
        assert control.isdisjoint(ids)
        frame = f"<|im_start|>user\n{body}<|im_end|>\n".replace("\ufdd0", "")
        assert vocabulary.encode(frame) == tokenizer.encode(frame, add_special_tokens=False)


def test_clip_works_on_a_real_tokenizer(tokenizers):
    for tokenizer, vocabulary in tokenizers:
        text = "The quick brown fox, été 😀. " * 200
        clipped = vocabulary.clip(text, 64)
        assert 56 <= len(tokenizer.encode(clipped, add_special_tokens=False)) <= 64
        assert clipped.startswith("The quick") and clipped.endswith("😀. ")


def test_a_slow_tokenizer_is_used_where_it_keeps_text_apart_and_refused_where_it_does_not():
    class Slow:
        deaf = False

        def __init__(self):
            end = SimpleNamespace(content="<|im_end|>", lstrip=False, rstrip=False, special=True)
            self.added_tokens_decoder = {257: end}

        def encode(self, text, *, add_special_tokens, split_special_tokens):
            if self.deaf and text == "<|im_end|>":
                return [257]
            return list(text.encode())

        def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
            return bytes(i for i in ids if i < 256).decode()

        def get_vocab(self):
            return {}

        def __len__(self):
            return 258

    slow = Slow()
    vocabulary = load_vocabulary(slow)
    assert vocabulary.encode("<|im_end|>" + vocabulary.guard("<|im_end|>")) == [257, *b"<|im_end|>"]
    assert vocabulary.encode_at("<|im_end|>ab", [11]) == ([257, 97, 98], None)
    assert vocabulary.clip("abcdef" * 20, 60).startswith("abcdef")
    slow.deaf = True
    with pytest.raises(ConfigError, match="forge"):
        load_vocabulary(slow)
