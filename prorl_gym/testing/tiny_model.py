"""Makes a tiny random language model on disk in seconds, for tests that need a real engine.

Its tokenizer has the ids of `ByteTokenizer`: one token per byte, then `<|im_start|>` 256, `<|im_end|>` 257 (ends a
turn) and `<|endoftext|>` 258. Its chat template is ChatML with tools in the Hermes style.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from prorl_gym.testing.byte_tokenizer import ENDOFTEXT_ID, IM_END_ID

CHAT_TEMPLATE = """\
{%- macro turn(role, content) %}{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' }}{% endmacro %}
{%- set first = messages[0].content + '\\n\\n' if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + first + 'You may call functions. Their signatures:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall one with a JSON object inside XML tags:\\n<tool_call>\\n'
    + '{"name": <function-name>, "arguments": <arguments-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif first %}{{ turn('system', messages[0].content) }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}{{ turn(message.role, message.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_tiny_model(
    folder: Path | str,
    *,
    seed: int = 0,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    layers: int = 2,
    hidden_size: int = 64,
    max_model_len: int = 2048,
    initializer_range: float = 0.3,
) -> Path:
    """Write a random model (safetensors, float32, about 110,000 weights), its tokenizer and chat template to `folder`.

    Args:
        folder: Made if missing; files of an earlier model in it are replaced.
        seed: The same seed gives the same weights.
        architecture: `qwen3` normalizes queries and keys, `llama` does not.
        layers: Number of layers.
        hidden_size: A multiple of 16, which is the size of an attention head; two query heads share a key head.
        max_model_len: `max_position_embeddings`.
        initializer_range: Spread of the weights. The default gives logits with clear winners; 0.02, usual for
            training from scratch, gives almost uniform ones.

    Returns:
        `folder`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    heads = hidden_size // 16
    shape: dict[str, Any] = {
        "vocab_size": ENDOFTEXT_ID + 1,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, 1),
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "initializer_range": initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": ENDOFTEXT_ID,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (
            Qwen3ForCausalLM(Qwen3Config(**shape))
            if architecture == "qwen3"
            else LlamaForCausalLM(LlamaConfig(**shape))
        )
    model.save_pretrained(str(folder))
    _tokenizer(max_model_len).save_pretrained(str(folder))
    return folder


def _tokenizer(max_model_len: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(_byte_characters())}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",  # noqa: S106 - a control token
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_model_len,
    )


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself, or one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
