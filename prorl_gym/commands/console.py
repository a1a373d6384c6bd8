"""The console that commands print to."""

from rich.console import Console

_WIDTH_OF_A_PIPE = 200


def make_console() -> Console:
    """Standard output; where it is no terminal and so has no width, wide enough for whole table rows."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_PIPE
    return console
