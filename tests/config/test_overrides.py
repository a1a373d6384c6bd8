"""M-01: what Hydra's grammar cannot read is refused with the key and a quoting that works."""

import shlex

import pytest

from prorl_gym.config.compose import load_config
from prorl_gym.config.overrides import parse_override
from prorl_gym.errors import ConfigError

AWKWARD = [
    "<|im_end|>",
    "http://h:8000/v1?x=1",
    r"Put it in \boxed{}",
    "a,b",
    "~/models",
    "a=b",
    "it's, so",
    'say "hi", {ok}',
    'ends with a backslash, "\\',
    "choice(a,b)",
    "{",
]


@pytest.mark.parametrize("value", AWKWARD)
def test_the_suggested_quoting_gives_the_very_value(value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_override(f"policy.model={value}")
    message = str(refused.value)
    assert message.startswith("policy.model: ")
    if "as text write " in message:
        (argument,) = shlex.split(message.split("as text write ")[1])
        assert parse_override(argument).value == value
    else:
        assert value == "{"
        assert "quote the texts inside" in message


def test_a_comma_offers_the_list_too() -> None:
    with pytest.raises(ConfigError, match=r"'images.allow=\[a,b\]'"):
        parse_override("images.allow=a,b")
    assert load_config(["images.allow=[a,b]"]).images.allow == ("a", "b")


def test_the_documented_quoting_works() -> None:
    config = load_config(['policy.model="/models/a=b"', 'backend.addresses=["http://h:8000/v1?x=1","http://i"]'])
    assert config.policy.model == "/models/a=b"
    assert config.backend.addresses == ("http://h:8000/v1?x=1", "http://i")


def test_a_word_is_no_override() -> None:
    with pytest.raises(ConfigError, match=r"'pipeline\.run\.workers' is not an override; write key=value"):
        load_config(["pipeline.run.workers"])


def test_a_key_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server.port.x: port is a plain value"):
        load_config(["server.port.x=1"])
