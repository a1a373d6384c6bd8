"""Frozen configuration models, and how they come out of Hydra."""
