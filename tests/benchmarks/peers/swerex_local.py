"""SWE-ReX, local runtime, as it comes: `swerex_local.py FOLDER`."""

import asyncio
import sys

from channel import serve
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

with asyncio.Runner() as runner:
    runtime = LocalRuntime()
    runner.run(runtime.create_session(CreateBashSessionRequest()))
    runner.run(runtime.run_in_session(BashAction(command=f"cd {sys.argv[1]}")))
    try:
        serve(lambda command: runner.run(runtime.run_in_session(BashAction(command=command, timeout=30))).output)
    finally:
        runner.run(runtime.close())
