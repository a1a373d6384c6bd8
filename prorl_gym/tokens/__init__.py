"""The token record, and chat rendering and parsing on top of it."""
