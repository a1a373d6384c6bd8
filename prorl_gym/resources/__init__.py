"""Resources servers: NeMo Gym's contract, in process or over HTTP."""
