"""`doctor`: proves what this host can do, in words and by exit code."""

import json
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prorl_gym.commands.console import make_console
from prorl_gym.commands.rollout_run import run_interruptibly
from prorl_gym.config.compose import load_config
from prorl_gym.config.models import ProrlConfig
from prorl_gym.config.suggest import did_you_mean
from prorl_gym.doctor.examination import Examination, as_json, exit_code
from prorl_gym.doctor.finding import Finding
from prorl_gym.errors import ConfigError
from prorl_gym.logs import configure_logging

_OPTIONS = {"--json"}
_COLOURS = {"ok": "green", "note": "yellow", "failed": "bold red"}
_HELP = """\
usage: python -m prorl_gym doctor [--json] [KEY=VALUE ...]

Tries in about a minute whether this host does what serving with this configuration needs: for each kind of sandbox that
it uses, isolation from the network, from other jobs and from the service, limits, speed and clean ends; and the host's
room, the backends and the renderer. Small bounded probes inside sandboxes of its own; nothing stays but the tool
environment in paths.state, which the service uses too.

  python -m prorl_gym doctor
  python -m prorl_gym doctor runtime=apptainer runtime.image=/images/python.sif
  python -m prorl_gym doctor --json 'backend.addresses=["http://n1:8000/v1"]' policy.model=Qwen/Qwen3-0.6B

ok      it holds
note    this host or this kind does not do it, and says so (RuntimeInfo.unenforced)
failed  it should hold and does not; what to do stands beside it

Exit code: 0 nothing failed, 1 something did, 2 wrong configuration.
"""


def help_text() -> str:
    """How the command is used."""
    return _HELP


def doctor_command(arguments: list[str]) -> int:
    """Make all checks, print what was found.

    Raises:
        ConfigError: The configuration is wrong, or an option unknown.
    """
    options = {argument for argument in arguments if argument.startswith("-")}
    for option in sorted(options - _OPTIONS):
        raise ConfigError(f"doctor: unknown option {option}{did_you_mean(option, _OPTIONS)}")
    config = load_config([argument for argument in arguments if argument not in options])
    configure_logging(config.logging.model_copy(update={"level": "ERROR"}))
    began = time.monotonic()
    if "--json" in options:
        findings = _examine(config, Console(stderr=True), lines=False)
        sys.stdout.write(json.dumps(as_json(findings, time.monotonic() - began), indent=2) + "\n")
        return exit_code(findings)
    console = make_console()
    findings = _examine(config, console, lines=not console.is_terminal)
    _print_summary(console, findings, time.monotonic() - began)
    return exit_code(findings)


def _examine(config: ProrlConfig, console: Console, *, lines: bool) -> list[Finding]:
    """With the present check shown on a terminal, or a line per finding elsewhere."""

    def report(finding: Finding) -> None:
        if lines:
            fix = f" -> {finding.fix}" if finding.fix and finding.status != "ok" else ""
            where = f"{finding.area:<10}  {finding.name:<24}"
            console.out(f"{finding.status:<6}  {where}  {_one_line(finding.detail)}{fix}", highlight=False)

    if not console.is_terminal:
        return run_interruptibly(Examination(config, report, lambda _: None).run())
    with console.status("looking at this host") as status:
        return run_interruptibly(Examination(config, report, lambda words: status.update(escape(words))).run())


def _print_summary(console: Console, findings: list[Finding], seconds: float) -> None:
    if console.is_terminal:
        table = Table("", "", "what", "found", "what to do", box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            status = f"[{_COLOURS[finding.status]}]{finding.status}[/]"
            cells = (finding.area, finding.name, _one_line(finding.detail), finding.fix or "")
            table.add_row(status, *map(escape, cells))
        console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in _COLOURS}
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.out(f"{len(findings)} checks in {seconds:.0f} s: {words}", highlight=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())
