"""Host side of the tools: what the model is told, and how a call reaches the sandbox."""
