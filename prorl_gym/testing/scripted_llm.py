"""The scripted language model as a process of its own.

`python -m prorl_gym.testing.scripted_llm --script FILE.json --port 0 --address-file F`: the file holds a script as
JSON, e.g. `{"replies": [{"text": "4"}]}` (see `prorl_gym.testing.script`). The first line of stdout is the address too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from prorl_gym.testing.byte_tokenizer import Tokenizer
from prorl_gym.testing.llm_server import RecordedRequest, ScriptedLlm
from prorl_gym.testing.script import load_script

__all__ = ["RecordedRequest", "ScriptedLlm", "main"]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prorl_gym.testing.scripted_llm", description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="JSON file with the fields of Script")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--address-file", type=Path, help="the base URL is written to it once the server listens")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--tokenizer", help="folder of a transformers tokenizer; default: one token per byte")
    parser.add_argument("--keep-prompts", action="store_true", help="keep every prompt in memory")
    return parser.parse_args(argv)


def _load_tokenizer(folder: str | None) -> Tokenizer | None:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


async def _run(options: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    llm = ScriptedLlm(
        load_script(options.script),
        tokenizer=tokenizer,
        model=options.model,
        max_model_len=options.max_model_len,
        host=options.host,
        port=options.port,
        keep_prompts=options.keep_prompts,
    )
    async with llm:
        if options.address_file is not None:
            await asyncio.to_thread(_write_whole, options.address_file, llm.address)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(llm.address + "\n")
            sys.stdout.flush()
        await stop.wait()


def _write_whole(path: Path, text: str) -> None:
    """Write so that a reader who finds the file finds all of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> Literal[0]:
    """Serve until SIGTERM or SIGINT."""
    import uvloop

    options = _parse(argv)
    uvloop.run(_run(options, _load_tokenizer(options.tokenizer)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
