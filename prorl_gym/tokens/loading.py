"""From the policy's configuration to a renderer that is proven for its model. Offline wherever the files are local."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from prorl_gym.config.models import PolicyConfig
from prorl_gym.errors import ConfigError
from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.chat_template import ChatTemplate, TemplateRefusal
from prorl_gym.tokens.library import FAMILIES, known_families
from prorl_gym.tokens.proof import make_library_renderer, make_template_renderer
from prorl_gym.tokens.tokenizer import load_vocabulary, template_ids

logger = logging.getLogger(__name__)


def load_renderer(config: PolicyConfig, model: str) -> ChatRenderer:
    """Load tokenizer and chat template of a model and prove a renderer for them. Blocks: seconds of CPU, perhaps a hub.

    Args:
        config: `renderer` chooses between a family of the `renderers` library and the template itself; `auto` takes the
            family where the library has one and it is proven for these very files.
        model: Local folder or hub id; `config.tokenizer` comes before it.

    Raises:
        ConfigError: There is no such tokenizer, it has no chat template, or nothing could be proven; says what to set.
    """
    family = _family(config, model)
    source = os.path.expanduser(config.tokenizer or model)
    tokenizer = _load_tokenizer(source)
    template = _load_template(tokenizer, source)
    vocabulary = load_vocabulary(tokenizer)
    stop_token_ids = _stop_token_ids(tokenizer, source)
    keep_thinking = config.thinking == "keep"

    def reference(messages: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: bool | None) -> list[int]:
        return template_ids(tokenizer, messages, tools, enable_thinking=thinking)

    if family is not None:
        try:
            return make_library_renderer(
                family,
                tokenizer,
                vocabulary,
                stop_token_ids=stop_token_ids,
                keep_thinking=keep_thinking,
                reference=reference,
            )
        except TemplateRefusal as refusal:
            if config.renderer == family:
                raise ConfigError(
                    f"policy.renderer: {family!r} does not write what the chat template of {source!r} writes "
                    f"({refusal}). Set policy.renderer=template, or auto."
                ) from refusal
            logger.info("%s: its own chat template is used; renderers:%s does not fit: %s", source, family, refusal)
    return make_template_renderer(
        vocabulary,
        template,
        calls=config.tool_call_format,
        stop_token_ids=stop_token_ids,
        keep_thinking=keep_thinking,
        reference=reference,
    )


def _family(config: PolicyConfig, model: str) -> str | None:
    """The family of the `renderers` library to try; None for the template itself.

    Raises:
        ConfigError: There is no such family, or the settings contradict each other.
    """
    if config.renderer == "template":
        return None
    if config.tool_call_format == "fenced":
        if config.renderer != "auto":
            raise ConfigError("policy.tool_call_format=fenced needs policy.renderer=template (or auto)")
        return None
    if config.renderer != "auto":
        if config.renderer not in (known := known_families()):
            raise ConfigError(
                f"policy.renderer: {config.renderer!r} is unknown; it takes auto, template, or one of "
                f"{', '.join(known)}"
            )
        return config.renderer
    from renderers.base import MODEL_RENDERER_MAP

    exact: str | None = MODEL_RENDERER_MAP.get(model)
    if exact is not None:
        return exact
    for source in (model, config.tokenizer):
        path = Path(source or "", "config.json").expanduser()
        if source and path.is_file():
            return FAMILIES.get(str(_read_settings(path).get("model_type")))
    return None


def _load_tokenizer(source: str) -> Any:
    """The tokenizer of a folder or hub id, from the local cache if it is there.

    Raises:
        ConfigError: It is nowhere.
    """
    from transformers import AutoTokenizer

    if _looks_local(source) and not Path(source).is_dir():
        raise ConfigError(
            f"policy.tokenizer: there is no folder {source!r} on this machine. Set policy.tokenizer to a local folder "
            "that holds the tokenizer of the model the engine serves, or to its hub id."
        )
    failure: Exception | None = None
    may_ask_the_hub = "/" in source and not Path(source).is_dir()
    for local_files_only in (True, False) if may_ask_the_hub else (True,):
        try:
            return AutoTokenizer.from_pretrained(source, local_files_only=local_files_only)
        except (OSError, ValueError, KeyError, ImportError) as error:
            failure = error
    raise ConfigError(
        f"policy.tokenizer: no tokenizer could be loaded from {source!r} ({_first_line(failure)}). Set policy."
        "tokenizer to a local folder with tokenizer.json and tokenizer_config.json, or to a hub id that "
        "this machine can reach."
    ) from failure


def _load_template(tokenizer: Any, source: str) -> ChatTemplate:
    """The tokenizer's chat template.

    Raises:
        ConfigError: It has none, or an invalid one.
    """
    try:
        text = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(
            f"policy.tokenizer: {source!r} has no chat template ({_first_line(error)}). Use the instruct version of "
            "the model, or set policy.tokenizer to a folder whose tokenizer_config.json has chat_template (or that "
            "holds chat_template.jinja)."
        ) from error
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    try:
        return ChatTemplate(text, special)
    except TemplateRefusal as error:
        raise ConfigError(f"policy.tokenizer: the chat template of {source!r} is {error}") from error


def _stop_token_ids(tokenizer: Any, source: str) -> list[int]:
    """End-of-turn ids of tokenizer and generation configuration."""
    found: list[Any] = [tokenizer.eos_token_id]
    path = Path(source, "generation_config.json")
    if path.is_file():
        told = _read_settings(path).get("eos_token_id")
        found.extend(told if isinstance(told, list) else [told])
    elif not Path(source).is_dir():
        found.extend(_hub_stop_token_ids(source))
    return [token for token in dict.fromkeys(found) if isinstance(token, int)]


def _hub_stop_token_ids(source: str) -> list[Any]:
    from transformers import GenerationConfig

    try:
        told = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        return []
    return told if isinstance(told, list) else [told]


def _read_settings(path: Path) -> dict[str, Any]:
    """One of the model's JSON files.

    Raises:
        ConfigError: It holds no JSON object.
    """
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"policy.model: {path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"policy.model: {path} holds no JSON object")
    return settings


def _looks_local(source: str) -> bool:
    return source.startswith(("/", "./", "../")) or source.count("/") > 1


def _first_line(error: Exception | None) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
