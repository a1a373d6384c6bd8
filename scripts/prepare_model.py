"""Get a model ready and print its folder: `python scripts/prepare_model.py [smollm2 | FOLDER | HUB_ID]`."""

import argparse
import sys
from pathlib import Path

from prorl_gym.embedded.model_prep import DEFAULT_MODEL, prepare
from prorl_gym.errors import ConfigError


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Get a model ready and print its folder.")
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="smollm2 (default), a local folder, or a hub id"
    )
    parser.add_argument(
        "--cache", type=Path, help="where prepared models are kept (default: ~/.cache/prorl_gym/models)"
    )
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.model, arguments.cache))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
