"""Where a turn's reasoning ends and what it says begins."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """A turn in two parts; `reasoning` is None where there is no block at all, `open` when its end was not sampled."""

    reasoning: str | None
    content: str
    open: bool = False


def split_reasoning(text: str, *, opened: bool) -> Split:
    """Take the reasoning block off the front of a turn.

    Tags inside a tool call or in running text are text. A block that was never closed is reasoning to its end, whatever
    stands in it.

    Args:
        text: What was sampled, end-of-turn token left out.
        opened: Whether the prompt had opened the block.
    """
    lead = text.lstrip()
    if lead.startswith(OPEN):
        lead = lead[len(OPEN) :]
    elif not opened:
        close, call = text.find(CLOSE), text.find("<tool_call>")
        if close < 0 or 0 <= call < close:
            return Split(None, text)
    reasoning, closed, content = lead.partition(CLOSE)
    if not closed:
        return Split(reasoning.strip("\n"), "", open=True)
    return Split(reasoning.strip("\n"), content.lstrip("\n"))
