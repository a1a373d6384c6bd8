"""Loads a causal language model and its tokenizer, and proves that the packed pass computes what the plain one does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from prorl_gym.embedded import attention
from prorl_gym.embedded.kv_slots import KVSlots, ModelShape
from prorl_gym.embedded.text import TextCodec
from prorl_gym.errors import ConfigError

log = logging.getLogger(__name__)

PROBE_TOKENS = 12
#: Largest log-probability difference between the packed and the plain pass, per dtype, that is still rounding.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        path: The folder it was loaded from.
        eos_id: The tokenizer's end token: ends a sequence with `stop_reason` null, as in vLLM.
        more_eos_ids: Further end tokens of generation_config: reported as `stop_reason`.
        max_len: Longest prompt + output in tokens.
    """

    path: str
    model: PreTrainedModel
    codec: TextCodec
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    eos_id: int | None
    more_eos_ids: frozenset[int]
    max_len: int


def load(path: str, *, dtype: str = "auto", device: str = "auto", max_model_len: int | None = None) -> LoadedModel:
    """Load the model in the folder `path`.

    Args:
        path: A folder as transformers saves it.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 where the device computes in it natively, else float32.
        device: A torch device, or `auto`: CUDA if there is one, else the CPU.
        max_model_len: None takes the model's own limit.

    Raises:
        ConfigError: The model cannot be loaded, is no plain full-attention causal model, or its packed pass differs.
    """
    attention.register()
    disable_progress_bar()
    torch_device = _device(device)
    torch_dtype = _dtype(dtype, torch_device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, attn_implementation=attention.NAME)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--model {path}: {error}") from error
    model = model.eval().requires_grad_(False).to(torch_device)
    config = model.config.get_text_config()
    eos_ids = _eos_ids(model)
    eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(sorted(eos_ids)), None)
    loaded = LoadedModel(
        path=path,
        model=model,
        codec=TextCodec(tokenizer),
        shape=_shape(config),
        device=torch_device,
        dtype=torch_dtype,
        vocab_size=config.vocab_size,
        eos_id=eos_id,
        more_eos_ids=frozenset(eos_ids - {eos_id}),
        max_len=_max_len(config, max_model_len),
    )
    _refuse_windows(config, loaded.max_len)
    _prove(loaded)
    return loaded


def read_weights(loaded: LoadedModel, path: str) -> dict[str, torch.Tensor]:
    """Read another checkpoint of the same model into memory; slow, any thread.

    Raises:
        ConfigError: There is none (safetensors only), or its tensors are not those of the loaded model.
    """
    try:
        other = AutoModelForCausalLM.from_pretrained(path, dtype=loaded.dtype, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no weights can be read from {path}: {error}") from error
    weights: dict[str, torch.Tensor] = other.state_dict()
    own = {name: tensor.shape for name, tensor in loaded.model.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != own:
        raise ConfigError(f"{path} holds another model than the one served")
    return weights


def copy_weights(loaded: LoadedModel, weights: dict[str, torch.Tensor]) -> None:
    """Overwrite the weights in place with what `read_weights` gave; no pass may be running."""
    loaded.model.load_state_dict(weights)


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without it float32 is several times faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def _device(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    if name.startswith("cuda") and not cuda:
        raise ConfigError(f"--device {name}: this torch sees no CUDA device")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type != "cpu" or native_bfloat16() else "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"--dtype {name}: expected auto, float32 or bfloat16")
    return dtypes[name]


def _eos_ids(model: PreTrainedModel) -> set[int]:
    found = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)


def _shape(config: object) -> ModelShape:
    heads = getattr(config, "num_attention_heads", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if heads is None or layers is None or hidden is None:
        raise ConfigError(
            f"--model: {type(config).__name__} does not name its heads and layers; use vLLM for this model"
        )
    return ModelShape(
        layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
    )


def _max_len(config: object, wanted: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        return int(limit or 4096)
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ConfigError(f"--max-model-len {wanted}: this model takes 2 to {limit}")
    return wanted


def _refuse_windows(config: object, max_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    limited = "sliding_attention" in kinds and (window is None or window < max_len)
    if limited or kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"--model: attention layers {sorted(kinds)} (window {window}) are not supported beyond the window; "
            f"set --max-model-len {window} or use vLLM"
        )


def _prove(loaded: LoadedModel) -> None:
    """Compare a packed pass, in two chunks, with the plain one on probe tokens."""
    model, device = loaded.model, loaded.device
    count = min(PROBE_TOKENS, loaded.max_len)
    ids = torch.arange(count, device=device)[None] * 37 % loaded.vocab_size
    cache = KVSlots(loaded.shape, slots=2, max_len=count, dtype=loaded.dtype, device=device)
    packed = []
    with torch.inference_mode():
        for begin, end in ((0, count // 2), (count // 2, count)):
            step = attention.PackedStep([attention.Row(1, begin, 0, end - begin)], cache, device)
            packed.append(forward(model, ids[:, begin:end], step, torch.arange(end - begin, device=device)))
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        plain = model(input_ids=ids, use_cache=False).logits[0]
        model.set_attn_implementation(attention.NAME)
    difference = (torch.cat(packed).float().log_softmax(-1) - plain.float().log_softmax(-1)).abs().max().item()
    if not difference <= PROBE_TOLERANCE[loaded.dtype]:
        raise ConfigError(
            f"--model: {type(model).__name__} does not compute the same packed as plain (log-probabilities differ by "
            f"{difference:.2g}); use vLLM for this model"
        )
    log.info("packed and plain pass agree within %.1g", difference)


def forward(model: PreTrainedModel, ids: torch.Tensor, step: attention.PackedStep, keep: torch.Tensor) -> torch.Tensor:
    """One packed pass. ids: [1, T]; keep: [N] packed indices whose logits are wanted; returns [N, V]."""
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=step.positions[None], use_cache=False, logits_to_keep=keep, packed_step=step
    ).logits[0]
    return logits
