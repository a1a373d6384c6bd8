"""Rollout as a service for reinforcement learning of multi-turn LLM agents.

Importing the package imports nothing heavy: the trainer side needs `prorl_gym.client` and `prorl_gym.types` only.
"""

__version__ = "0.1.0"
