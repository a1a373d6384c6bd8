"""The command line: finds the command, shows help, turns a ConfigError into one message and exit code 2.

The invariant: nothing is imported before the command is known, so help answers at once.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorl_gym import __version__
from prorl_gym.errors import ConfigError, ProrlGymError

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `function` in `prorl_gym.commands.<module>`, called with the arguments after its name."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "serve": Command("serve", "serve_command", "serve rollouts over HTTP (the default)"),
    "rollout": Command("rollout", "rollout_command", "roll out a data set, with a progress bar and a summary"),
    "demo": Command("demo", "demo_command", "8 math problems twice each, with a real small model in real sandboxes"),
    "verify": Command("verify", "verify_command", "check a rollout file token by token, offline"),
    "doctor": Command("doctor", "doctor_command", "prove what this host can do: isolation, limits, speed, clean ends"),
    "images": Command("images", "images_command", "build, fetch, list and prune the images of sandboxes"),
    "environments": Command("environments", "environments_command", "list the tasks that would be served"),
    "gym-config": Command("gym_config", "gym_config_command", "print the gym tree as NeMo Gym's YAML"),
    "gym-root": Command("gym_root", "gym_root_command", "print the folder that holds conf, resources_servers, agents"),
}

USAGE = """\
prorl_gym {version}: rollout as a service for RL training of multi-turn LLM agents

usage: python -m prorl_gym [COMMAND] [KEY=VALUE ...]

commands:
{commands}

Overrides follow Hydra's grammar: a group's option (runtime=local, 'environment=[math]') or a value
(pipeline.run.workers=256, 'backend.addresses=["http://n1:8000/v1"]'). A value with = , {{ }} < > | ? or spaces wants
double quotes inside the shell's single quotes: 'policy.model="/models/a=b"'.
`python -m prorl_gym COMMAND --help` says more, `serve --help` lists every key.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 fine, 1 failed, 2 wrong configuration, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except ConfigError as e:
        sys.stderr.write(f"error: {e}\n")
        return EXIT_CONFIG
    except ProrlGymError as e:
        sys.stderr.write(f"error: {e}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has gone; nothing is left to say, also at exit
        return EXIT_FAILED


def _run(given: list[str]) -> int:
    name = given[0] if given else "serve"
    if name in {"-h", "--help", "help"}:
        _write(_usage())
        return 0
    if name == "--version":
        _write(f"prorl_gym {__version__}\n")
        return 0
    is_override = "=" in name or name.startswith(("+", "~"))
    if not is_override and name not in COMMANDS:
        raise ConfigError(_unknown(name))
    command = COMMANDS["serve" if is_override else name]
    rest = given if is_override else given[1:]
    module = importlib.import_module(f"prorl_gym.commands.{command.module}")
    if {"-h", "--help"} & set(rest) and hasattr(module, "help_text"):
        _write(module.help_text())
        return 0
    function: Callable[[list[str]], int] = getattr(module, command.function)
    return function(rest)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return USAGE.format(version=__version__, commands=lines)


def _unknown(name: str) -> str:
    from prorl_gym.config.suggest import did_you_mean

    what = "option" if name.startswith("-") else "command"
    return f"unknown {what} {name!r}{did_you_mean(name, COMMANDS)}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
