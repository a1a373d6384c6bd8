"""The shipped test kit: a scripted LLM server, a tiny model, faults. Never imported by the core."""

from prorl_gym.testing.byte_tokenizer import ByteTokenizer
from prorl_gym.testing.llm_server import RecordedRequest, ScriptedLlm
from prorl_gym.testing.script import Conversation, Reply, Script
from prorl_gym.testing.tiny_model import make_tiny_model

__all__ = ["ByteTokenizer", "Conversation", "RecordedRequest", "Reply", "Script", "ScriptedLlm", "make_tiny_model"]
