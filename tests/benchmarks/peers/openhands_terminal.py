"""OpenHands tools: `openhands_terminal.py tmux|subprocess FOLDER`."""

import os
import sys

os.environ.update(OPENHANDS_SUPPRESS_BANNER="1", LOG_LEVEL="ERROR", LITELLM_LOCAL_MODEL_COST_MAP="True")

from channel import serve
from openhands.tools.terminal.definition import TerminalAction
from openhands.tools.terminal.impl import TerminalExecutor

executor = TerminalExecutor(working_dir=sys.argv[2], terminal_type=sys.argv[1])
try:
    serve(lambda command: executor(TerminalAction(command=command, timeout=30)).text)
finally:
    executor.close()
