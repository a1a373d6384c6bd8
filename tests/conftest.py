"""What tests of several parts share."""

import pytest

from prorl_gym.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder whose tokenizer is the scripted LLM's; served under this name, `policy.model=auto` finds it."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), max_model_len=32768))
