"""From a policy's configuration to a renderer, or to a sentence that says what to set."""

import json
import shutil

import pytest

from prorl_gym.config.models import PolicyConfig
from prorl_gym.errors import ConfigError
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.testing.tiny_model import make_tiny_model
from prorl_gym.tokens.loading import load_renderer
from prorl_gym.tokens.records import ChatMessage, ToolRequest
from prorl_gym.tokens.tokenizer import template_ids

from .templates import CHATML, COUNTS

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object"}}}]
REQUEST = ToolRequest("call_0_0", "bash", {"command": 'echo "é"\n'})
CONVERSATIONS = [
    [ChatMessage("user", "How?")],
    [ChatMessage("system", "Be brief.\n"), ChatMessage("user", "\n\nHow? 😀 ")],
    [ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c")],
    [
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b", reasoning="hm", tool_requests=(REQUEST, REQUEST)),
        ChatMessage("tool", "one", tool_call_id="call_0_0"),
        ChatMessage("tool", "", tool_call_id="call_0_0"),
    ],
]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def with_template(folder, target, template: str | None):
    """A copy of a tokenizer's folder with another chat template."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target / name)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def test_the_tiny_models_folder_gives_the_ids_of_the_byte_renderer(tiny_folder):
    renderer, files_free = load_renderer(PolicyConfig(), str(tiny_folder)), byte_renderer()
    for conversation in CONVERSATIONS:
        assert renderer.start(conversation, TOOLS) == files_free.start(conversation, TOOLS)
    assert set(renderer.stop_token_ids) <= set(files_free.stop_token_ids)
    assert 257 in renderer.stop_token_ids


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_qwen3_prompts_are_the_tokenizers_own_id_for_id(qwen3_template, qwen3_folder, tools, thinking):
    tokenizer = tokenizer_of(qwen3_folder)
    assert qwen3_template.name == "template-difference:native-hermes"
    for conversation in CONVERSATIONS:
        ids = qwen3_template.start(conversation, tools, enable_thinking=thinking).ids
        messages = qwen3_template.layout.messages(conversation, tools, None)
        assert ids == template_ids(tokenizer, messages, tools, enable_thinking=thinking)


def test_smollm2_prompts_without_tools_are_the_tokenizers_own_id_for_id(smollm2, smollm2_folder):
    tokenizer = tokenizer_of(smollm2_folder)
    assert smollm2.name == "template-difference:text-hermes"
    for conversation in CONVERSATIONS[:3]:
        messages = [{"role": message.role, "content": message.content} for message in conversation]
        assert smollm2.start(conversation, []).ids == template_ids(tokenizer, messages)
    assert smollm2.stop_token_ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_tokenizer_setting_comes_before_the_model(tiny_folder):
    assert load_renderer(PolicyConfig(tokenizer=str(tiny_folder)), "served-under-any-name")


def test_more_end_of_turn_ids_come_from_the_generation_configuration(tiny_folder, tmp_path):
    folder = with_template(tiny_folder, tmp_path / "m", CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258, null]}')
    assert load_renderer(PolicyConfig(), str(folder)).stop_token_ids == (257, 258)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        load_renderer(PolicyConfig(), str(folder))


def test_settings_reach_the_renderer(tiny_folder):
    renderer = load_renderer(PolicyConfig(tool_call_format="fenced", thinking="keep"), str(tiny_folder))
    assert renderer.name == "template-difference:text-fenced,thinking=keep"


def test_what_is_not_there_is_said_with_the_setting_to_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"policy\.tokenizer: there is no folder '/no/such/model'"):
        load_renderer(PolicyConfig(), "/no/such/model")
    with pytest.raises(ConfigError, match=r"policy\.tokenizer: no tokenizer could be loaded from '.*local folder with"):
        load_renderer(PolicyConfig(), str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ConfigError, match=r"no tokenizer could be loaded from 'served-name'"):
        load_renderer(PolicyConfig(), "served-name")


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_fix(tiny_folder, tmp_path):
    folder = with_template(tiny_folder, tmp_path / "m", None)
    with pytest.raises(ConfigError, match=r"has no chat template.*instruct version"):
        load_renderer(PolicyConfig(), str(folder))


def test_a_template_that_cannot_be_proven_is_refused_with_what_differed(tiny_folder, tmp_path):
    folder = with_template(tiny_folder, tmp_path / "m", COUNTS)
    with pytest.raises(ConfigError, match="later messages change how earlier ones are written"):
        load_renderer(PolicyConfig(), str(folder))
    folder = with_template(tiny_folder, tmp_path / "n", "{% for %}")
    with pytest.raises(ConfigError, match="not a valid template"):
        load_renderer(PolicyConfig(), str(folder))


class Mapping(dict):
    """As transformers 5 returns it."""


@pytest.mark.parametrize("returned", [[1, 2], [[1, 2]], Mapping(input_ids=[1, 2]), Mapping(input_ids=[[1, 2]])])
def test_every_return_type_of_apply_chat_template_gives_the_same_flat_list(returned):
    class Tokenizer:
        def apply_chat_template(self, messages, **settings):
            return returned

    ids = template_ids(Tokenizer(), [{"role": "user", "content": "x"}])
    assert ids == [1, 2] and type(ids) is list


def test_tensors_are_flattened_too():
    import torch

    class Tokenizer:
        def apply_chat_template(self, messages, **settings):
            return Mapping(input_ids=torch.tensor([[1, 2]]))

    assert template_ids(Tokenizer(), []) == [1, 2]
