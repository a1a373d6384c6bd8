"""The HTTP face of the service: composition root, routes, listener and process life cycle."""
