"""Turns SmolLM2's GGUF file into an ordinary model folder: `python -m prorl_gym.embedded.gguf_conversion GGUF FOLDER`.

Its own process: the conversion needs torch, a gigabyte of memory and prints progress of its own; who asks for it should
pay for none of these.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder` (config, safetensors in float32, tokenizer, chat template) from the file `gguf`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # transformers' GGUF reader forgets that SmolLM2 splits digits, which changes the ids of blanks before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized now, but the model would still be saved as a quantized one.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
