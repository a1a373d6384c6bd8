"""`environments`: what a service with these overrides would serve."""

from prorl_gym.config.compose import compose
from prorl_gym.config.gym_tree import task_alias

_HELP = """\
usage: python -m prorl_gym environments [KEY=VALUE ...]

Lists the tasks that a service with the same overrides would serve, e.g.

  python -m prorl_gym environments 'environment=[math]'
"""


def help_text() -> str:
    """How the command is used."""
    return _HELP


def environments_command(arguments: list[str]) -> int:
    """Print a table of the tasks."""
    composition = compose(arguments)
    config = composition.config
    from rich.table import Table

    from prorl_gym.commands.console import make_console

    table = Table("task", "agent", "resources server", "tools", "sandbox", "max turns", "also known as", box=None)
    aliases: dict[str, list[str]] = {}
    for alias, task in config.task_aliases.items():
        aliases.setdefault(task, []).append(alias)
    for environment in config.environments:
        name, agent = environment.name, environment.agent
        short = task_alias(name)
        names = dict.fromkeys([short, *aliases.get(name, []), *aliases.get(short, [])])
        sandbox = "none" if agent.sandbox is None else (agent.sandbox.runtime or config.runtime.kind)
        turns = str(min(agent.max_turns, agent.max_steps or agent.max_turns))
        also = ", ".join(each for each in names if each != name)
        world = environment.resources_type or "none"
        table.add_row(name, environment.agent_type, world, ", ".join(agent.tools), sandbox, turns, also)
    for name, path in config.handlers.items():
        table.add_row(name, path, "", "", "", "", ", ".join(aliases.get(name, [])))
    console = make_console()
    console.print(table)
    for source in composition.sources:
        if source.startswith("environment/"):
            console.print(source, style="dim", soft_wrap=True)
    for warning in composition.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    return 0
