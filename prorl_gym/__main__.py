"""`python -m prorl_gym`."""

import sys

from prorl_gym.cli import main

if __name__ == "__main__":
    sys.exit(main())
