"""How a peer's script talks to the benchmark: JSON lines, requests on stdin and answers on the stdout it was born with.

A request names a command and how often to run it; the answer holds the seconds that each run took. Only the standard
library is imported: each peer runs under a Python of its own.
"""

import json
import os
import sys
import time
from collections.abc import Callable

WARM_UP = 3


def serve(run: Callable[[str], str]) -> None:
    """Answer requests until stdin ends; `run` takes a command and returns what it printed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        samples, wrong = [], 0
        for number in range(WARM_UP + request["repeats"]):
            started = time.perf_counter()
            output = run(request["command"])
            took = time.perf_counter() - started
            if number >= WARM_UP:
                samples.append(took)
                wrong += request["expect"] not in output
        answers.write(json.dumps({"samples": samples, "wrong": wrong}) + "\n")
