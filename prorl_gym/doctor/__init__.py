"""Proofs of what this host can do: see `examination`."""
