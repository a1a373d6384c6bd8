"""Web search and page reading, on the host's side: the sandbox may have no network."""
