"""`gym-root`: where the shipped environments lie."""

import sys

from prorl_gym.config.roots import bundle
from prorl_gym.errors import ConfigError

_HELP = """\
usage: python -m prorl_gym gym-root

Prints the folder that holds the shipped conf, resources_servers and agents, e.g. for NeMo Gym's own search:

  NEMO_GYM_EXTRA_ROOTS=$(python -m prorl_gym gym-root) gym list environments
"""


def help_text() -> str:
    """How the command is used."""
    return _HELP


def gym_root_command(arguments: list[str]) -> int:
    """Print the folder."""
    if arguments:
        raise ConfigError(f"gym-root takes no arguments, not {' '.join(arguments)!r}")
    sys.stdout.write(f"{bundle()}\n")
    return 0
