import asyncio
import time

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cell(runtime):
    async def run(code, timeout_s=20.0):
        return await runtime.call("ipython", {"code": code}, timeout_s=timeout_s)

    return run


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1+1", "2\n"),
        ("'a'", "'a'\n"),
        ("print('x'); 5", "x\n5\n"),
        ("1;", ""),
        ("", ""),
        ("import sys; print('e', file=sys.stderr)", "e\n"),
        ("import os; print('a', flush=True); os.system('echo b'); print('c')", "a\nb\nc\n"),
        ("!echo shell", "shell\n"),
        ("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')", "awaited\n"),
        ("print('\\x1b[31mred\\x1b[0m')", "red\n"),
        ("print('\\ud83d', 'nul\\0')", "? nul\n"),
        ("%%bash\necho magic", "magic\n"),
        ("import os\npid = os.fork()\nif pid == 0: os._exit(0)\nprint(os.waitpid(pid, 0)[1])", "0\n"),
        (
            "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))",
            "[1, 2]\n",
        ),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(7)'])\nNone", "7\n"),
        ("class A:\n  def _repr_png_(self): return b'PNG'\ndisplay(A())", "[picture saved as /tmp/pictures/1.png]\n"),
    ],
)
async def test_cells(cell, code, text):
    reply = await cell(code)
    assert (reply.text, reply.error) == (text, False)
    assert reply.exit_code is None


async def test_state_lasts_and_errors_are_compact(cell):
    await cell("value = 41\ndef broken(n):\n    return n / 0")
    reply = await cell("print('before')\nbroken(value)")
    assert reply.error
    assert reply.text.startswith("before\nTraceback")
    assert "ZeroDivisionError: division by zero" in reply.text
    assert "return n / 0" in reply.text
    assert reply.text.count("\n") < 12
    assert (await cell("value + 1")).text == "42\n"
    assert "SyntaxError" in (await cell("def")).text


async def test_input_is_refused_at_once(cell):
    """I-02."""
    for code in ("name = input('? ')", "import getpass; getpass.getpass()"):
        reply = await cell(code)
        assert "StdinNotImplementedError" in reply.text
    assert (await cell("import sys; sys.stdin.read()")).text == "''\n"
    assert (await cell("print('next')")).text == "next\n"


async def test_all_output_belongs_to_its_cell(cell):
    """I-05."""
    reply = await cell("for i in range(20000): print(i)")
    assert reply.text.splitlines()[-1] == "19999"
    await cell("import threading\nt = threading.Timer(0.2, print, ['LATE'])\nt.start()")
    await asyncio.sleep(0.5)  # nothing tells the host that a thread inside printed something
    reply = await cell("print('second')")
    assert reply.text == ("[printed by background activity before this call]\nLATE\n[output of this call]\nsecond\n")


async def test_a_daemon_that_keeps_the_output_does_not_hold_the_cell(cell):
    """I-10."""
    started = time.monotonic()
    assert (await cell("import os\nos.system('tail -f /dev/null &')\nprint('up')")).text == "up\n"
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os; os.system('sleep 60')",
        "import subprocess; subprocess.run(['sleep', '60'])",
    ],
)
async def test_an_interrupt_keeps_the_state(cell, code):
    await cell("kept = 'here'")
    started = time.monotonic()
    reply = await cell(f"print('BEFORE')\n{code}", timeout_s=0.4)
    assert reply.timed_out
    assert reply.text.startswith("BEFORE\n")
    assert time.monotonic() - started < 4
    assert (await cell("kept")).text == "'here'\n"


@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    ],
)
async def test_what_cannot_be_interrupted_is_killed_and_said(cell, code):
    await cell("lost = 1")
    reply = await cell(code, timeout_s=0.3)
    assert reply.timed_out
    assert "did not react and was killed; a new one was started" in reply.text
    assert "variables and imports are gone" in reply.text
    assert "NameError" in (await cell("lost")).text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "status -9"),
        ("import ctypes; ctypes.string_at(0)", "status -11"),
    ],
)
async def test_a_dead_process_is_told_and_replaced(cell, code, status):
    reply = await cell(f"print('last words', flush=True)\n{code}")
    assert reply.text.startswith("last words\n")
    assert f"ended with {status}" in reply.text
    assert (await cell("1")).text == "1\n"


@pytest.mark.parametrize("code", ["import sys; sys.exit(2)", "exit", "quit()", "raise SystemExit"])
async def test_exit_leaves_the_session(cell, code):
    await cell("kept = 1")
    await cell(code)
    assert (await cell("kept")).text == "1\n"


async def test_a_forked_child_that_runs_on_never_answers(cell):
    reply = await cell("import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait(); print('parent')")
    assert sorted(reply.text.split()) == ["child", "parent"]
    assert (await cell("2")).text == "2\n"


async def test_closed_and_replaced_streams_are_survived(cell):
    await cell("import os, sys\nos.close(2)\nsys.stderr = None")
    assert (await cell("print('on')")).text == "on\n"
    await cell("import os; os.close(1)")
    started = time.monotonic()
    await cell("1")
    assert time.monotonic() - started < 3
    await cell("import os; os._exit(0)")
    assert (await cell("1")).text == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.write = os.read = os.pread = None; os.getpid = lambda: 1",
        "import sys; del sys.stdout, sys.stderr",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
async def test_what_a_cell_does_to_python_does_not_end_the_session(cell, code):
    await cell("kept = 'here'")
    await cell(code)
    assert (await cell("kept")).text == "'here'\n"


async def test_errors_are_seen_whatever_stands_for_stdout(cell):
    reply = await cell("import io, sys; sys.stdout = io.StringIO(); 1/0")
    assert "ZeroDivisionError" in reply.text
    await cell("sys.stdout = sys.__stdout__")


@pytest.mark.parametrize("code", ["import builtins; builtins.len = None", "import sys; sys.modules.clear()"])
async def test_a_session_that_can_run_nothing_any_more_is_replaced(cell, code):
    """It would fail every cell, that which puts it right too."""
    await cell(code)
    replies = [await cell("40 + 2"), await cell("40 + 2")]
    assert "no other cell can run" in replies[0].text
    assert "a new one was started" in replies[0].text
    assert replies[1].text == "42\n"


async def test_endless_recursion_is_a_short_traceback(cell):
    reply = await cell("def again(): again()\nagain()")
    assert "RecursionError" in reply.text
    assert len(reply.text) < 3000


async def test_cells_import_from_the_working_directory(cell, runtime):
    await runtime.copy_in(b"answer = 42\n", "my_module.py")
    assert (await cell("import my_module; my_module.answer")).text == "42\n"
