"""Command line of the embedded inference server: `python -m prorl_gym.embedded --model smollm2`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from prorl_gym.errors import ConfigError


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m prorl_gym.embedded",
        description="Serve a language model over HTTP in vLLM's dialect: token ids in, token ids and logprobs out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder, or a hub id")
    parser.add_argument("--served-model-name", help="name in /v1/models; the model's folder when not given")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; anyone who reaches it can use the model")
    parser.add_argument("--port", type=int, default=0, choices=range(65536), metavar="PORT", help="0 takes a free one")
    parser.add_argument("--address-file", type=Path, help="written once the server listens: http://HOST:PORT")
    parser.add_argument("--watch-fd", type=int, help="inherited descriptor; its end of file ends the server")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of weights and cache")
    parser.add_argument("--max-model-len", type=_positive, help="tokens of prompt and output; the model's own limit")
    parser.add_argument("--max-num-seqs", type=_positive, default=16, help="sequences computed at once")
    parser.add_argument("--threads", type=_positive, help="CPU threads; one less than cores when not given")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns 2 when it cannot be started as asked."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # torch's threads spin while they wait for each other. On cores shared with sandboxes one of them is off its core
    # meanwhile, and a step takes 10 times as long; sleeping costs a third when the cores are ours alone. OpenMP reads
    # this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from prorl_gym.embedded.serve import ServeOptions, serve

    try:
        serve(ServeOptions(**vars(options)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command line
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
