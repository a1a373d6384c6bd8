"""One module per kind of engine."""

from prorl_gym.backends.dialects.catalog import DIALECTS, candidates, detect

__all__ = ["DIALECTS", "candidates", "detect"]
