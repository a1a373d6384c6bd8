"""`serve`: the service, until a signal or POST /stop ends it."""

import logging

from prorl_gym.config.compose import Composition, compose

_HELP = """\
usage: python -m prorl_gym [serve] [KEY=VALUE ...]

Serves rollouts over HTTP until SIGTERM, SIGINT or POST /stop {"exit": true}. Exit codes: 0 stopped, 1 failed, 2 wrong
configuration.

  python -m prorl_gym 'backend.addresses=["http://n1:8000/v1"]' pipeline.run.workers=256
  python -m prorl_gym runtime=local server.port=0 server.address_file=address.txt

Groups (options come from the conf folder of every search root):
  environment=[A,B]  runtime=  tool=  backend=  pipeline=  server=  policy=  experiment=

Keys and their defaults (meaning: prorl_gym/config/models.py), beside NeMo Gym's tree below gym:
"""


def help_text() -> str:
    """How the command is used, and every key it takes."""
    from prorl_gym.config.models import ProrlConfig
    from prorl_gym.config.suggest import MADE_KEYS, key_defaults

    keys = "".join(f"  {key}={default}\n" for key, default in key_defaults(ProrlConfig) if key not in MADE_KEYS)
    return _HELP + keys


def serve_command(arguments: list[str]) -> int:
    """Serve; blocks until the service has ended."""
    composition = compose(arguments)
    from prorl_gym.logs import configure_logging
    from prorl_gym.server.serve import serve

    configure_logging(composition.config.logging)
    log_origin(composition)
    return serve(composition.config)


def log_origin(composition: Composition) -> None:
    """Say once where the configuration came from and what it resolved to."""
    log = logging.getLogger("prorl_gym.config")
    for source in composition.sources:
        log.info("composed %s", source)
    for warning in composition.warnings:
        log.warning("%s", warning)
    log.info("configuration %s", composition.config.model_dump_json())
