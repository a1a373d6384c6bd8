"""A small world that journals what is asked of it; the tests' resources server, loaded by path like any other."""

import asyncio
from pathlib import Path

from prorl_gym.errors import RequestError
from prorl_gym.resources.base import EpisodeOutcome, ResourcesServer, SessionStart, Verdict
from prorl_gym.tools.spec import ToolReply, ToolSpec

PRESS = ToolSpec("press", "Press the button.", {"type": "object", "properties": {}, "required": []})


class World(ResourcesServer):
    def journal(self, line: str) -> None:
        with Path(self.context.config["journal"]).open("a") as file:
            file.write(line + "\n")

    def check_row(self, row):
        if "goal" not in row:
            raise RequestError("a row of the world needs a goal", field="instance.goal")

    async def seed_session(self, session_id, row):
        self.journal(f"seed {session_id}")
        if row.get("seed_raises"):
            raise RuntimeError("no world today")
        files = {"data/input.txt": str(row["goal"]).encode()} if row.get("files", True) else {}
        return SessionStart(tools=(PRESS,), files=files)

    async def call_tool(self, session_id, name, arguments):
        return ToolReply(f"pressed in {session_id}")

    def capture(self, row):
        return ("out.txt", "never-written.txt")

    async def verify(self, session_id, row, outcome: EpisodeOutcome):
        self.journal(f"verify {session_id}")
        mode = row.get("verify")
        if mode == "raise":
            raise KeyError("the grader has a bug")
        if mode == "nan":
            return Verdict(float("nan"))
        if mode == "mask":
            return Verdict(0.0, mask_sample=True, failure_kind="judge_failed", failure_reason="the judge is asleep")
        while mode == "hold" and not Path(row["go"]).exists():
            await asyncio.sleep(0.01)
        out = outcome.artifacts.get("out.txt", b"").decode().strip()
        right = out == row["goal"] or outcome.answer == row["goal"]
        roles = [message["role"] for message in outcome.messages]
        detail = {"out": out, "answer": outcome.answer, "roles": roles, "stop_reason": outcome.stop_reason}
        return Verdict(float(right), resolved=right, components={"detail": detail})

    async def close_session(self, session_id):
        self.journal(f"close {session_id}")
