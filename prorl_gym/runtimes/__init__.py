"""Rootless sandboxes behind one contract."""
