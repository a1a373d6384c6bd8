"""`gym-config`: the gym tree as a YAML that NeMo Gym's configuration can hold."""

import sys

from prorl_gym.config.compose import compose

_HELP = """\
usage: python -m prorl_gym gym-config [KEY=VALUE ...]

Prints the gym tree as plain YAML: directives expanded, interpolations and names of secrets as they stand. The output
can be read back with 'gym.config_paths=[FILE]'.
"""


def help_text() -> str:
    """How the command is used."""
    return _HELP


def gym_config_command(arguments: list[str]) -> int:
    """Print the tree."""
    composition = compose(arguments)
    import yaml

    yaml.safe_dump(composition.gym, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
    return 0
