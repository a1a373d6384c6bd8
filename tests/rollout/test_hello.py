"""The example that a newcomer reads first."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "hello_rollout.py"


def test_hello_rollout_runs_and_fits_on_a_screen(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 50
    ran = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    first, *messages = ran.stdout.splitlines()
    assert first == "stop reason: answered"
    assert [line.split(",")[0].strip() for line in messages] == ["user", "assistant", "tool", "assistant"]
    assert "42" in messages[2]
    assert messages[3].endswith("'It is 42.'")
