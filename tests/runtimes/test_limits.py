from pathlib import Path

import pytest

from prorl_gym.runtimes.base import Limits

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUNGRY = "python3 -c \"b=bytearray(300<<20); import time; time.sleep(5); print('fed')\""


@pytest.fixture(params=["control group", "watchdog"])
def memory_guard(request, factory, monkeypatch):
    if request.param == "watchdog":
        monkeypatch.setattr(factory._host, "memory_groups", None)
    elif factory._host.memory_groups is None:
        pytest.skip("this host lets us make no memory control groups")


async def test_out_of_memory_is_an_observation(factory, memory_guard):
    spec = factory.spec(limits=Limits(memory_bytes=150 << 20))
    async with factory.create(spec) as runtime:
        group = runtime._record.memory_group
        reply = await runtime.call("bash", {"command": "x=kept; " + HUNGRY}, timeout_s=20)
        assert reply.exit_code == 137
        assert "over the sandbox's memory limit of 150 MB" in reply.text
        assert "fed" not in reply.text
        assert (await runtime.call("bash", {"command": "echo $x"}, timeout_s=5)).text == "kept\n"
        reply = await runtime.call("ipython", {"code": "b = bytearray(300 << 20)\nwhile True: pass"}, timeout_s=20)
        assert "ended with status -9" in reply.text
        assert "memory limit" in reply.text
        assert (await runtime.call("ipython", {"code": "1"}, timeout_s=20)).text == "1\n"
        assert "memory" not in runtime.describe().unenforced
    assert group is None or not Path(group).exists()
