"""What a model may type, and what must come of it. Case numbers name public reports of the same kind of fault."""

import time

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def bash(runtime):
    async def run(command, timeout_s=10.0):
        return await runtime.call("bash", {"command": command}, timeout_s=timeout_s)

    return run


async def test_state_lasts(bash):
    await bash("cd /usr; x=5; export y=6; f() { echo f$1; }; alias g='echo alias'; set -o pipefail")
    assert (await bash("pwd; f $x; g; bash -c 'echo $y'; set -o | grep pipefail")).text.split() == [
        "/usr", "f5", "alias", "6", "pipefail", "on",
    ]  # fmt: skip
    assert (await bash("cd /tmp; set +o pipefail")).details["cwd"] == "/tmp"


@pytest.mark.parametrize(
    ("command", "text", "code"),
    [
        ("printf 42", "42", 0),  # B-07
        ("echo hi \\", "hi \\\n", 0),  # B-19: a backslash at the very end
        ("cat", "", 0),
        ("read x; echo $?", "1\n", 0),
        ("head -c1 /dev/tty | wc -c", "0\n", 0),
        ("python3 2>&1; echo $?", "0\n", 0),  # B-11
        ("cat <<'A' <<'B'\none\nA\ntwo\nB", "two\n", 0),  # B-17
        ("case x in x) echo a;; esac; echo $(cat <<'E'\n\"q\nE\n)", 'a\n"q\n', 0),
        ("(exit 255)", "[exit code 255]", 255),
        ("kill -TERM $BASHPID & wait $!", None, 143),
        ("printf 'a\\0b'", "ab", 0),
        ("echo \"wow!\" 'history!'", "wow! history!\n", 0),
        ("yes | head -1", "y\n", 0),
        ("unset PATH; echo still; PATH=/usr/bin:/bin", "still\n", 0),
        ("", "", 0),
        ("# only a comment", "", 0),
        ("true & wait", None, 0),
        ("printf '\\033]prorl:0000000000000000\\007x'", "x", 0),  # somebody imitates the end mark
        ("enable -n printf; echo a; enable printf", "a\n", 0),
        ("tput cols 2>/dev/null; stty size < /dev/tty", "200\n50 200\n", 0),
    ],
)
async def test_commands(bash, command, text, code):
    started = time.monotonic()
    reply = await bash(command)
    assert reply.exit_code == code
    assert not reply.timed_out
    if text is not None:
        assert reply.text == text
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "command", ["if then", "echo 'unbalanced", "echo $((", "cat <<EOF\nnever ended", "{ echo a", "for"]
)
async def test_a_syntax_error_is_bashs_own_message(bash, command):
    reply = await bash(command)
    assert not reply.timed_out
    if not command.startswith("cat"):  # bash takes the end of the text for the end of the document
        assert reply.exit_code != 0
        assert "line" in reply.text
    assert (await bash("echo ok")).text == "ok\n"


async def test_a_pager_or_editor_never_waits(bash):
    """B-11."""
    await bash("mkdir -p /tmp/r && cd /tmp/r && git init -q . && git config user.email a@b && git config user.name n")
    await bash("for i in $(seq 40); do git commit -q --allow-empty -m c$i; done", timeout_s=60)
    assert (await bash("git log --oneline")).text.count("\n") == 40
    commit = await bash("git commit --allow-empty")
    assert commit.exit_code != 0
    assert "editor" in commit.text


async def test_colours_and_progress_bars_are_cleaned(bash):
    """B-13."""
    assert (await bash("printf '\\033[1;31mred\\033[0m 10%%\\r50%%\\r100%%\\n'; ls --color=always -d /usr")).text == (
        "100%\n/usr\n"
    )


async def test_long_lines_are_not_wrapped(bash):
    """B-21."""
    assert (await bash("""python3 -c "print('PASSED '*100)" """)).text == "PASSED " * 100 + "\n"
    assert (await bash("echo " + "x" * 300_000)).text.count("\n") < 5
    assert (await bash(": " + "'quoted' " * 60_000 + "; echo done")).text == "done\n"


async def test_a_timeout_keeps_the_output_and_the_shell(bash):
    """B-09."""
    await bash("kept=here")
    started = time.monotonic()
    reply = await bash("echo BEFORE; sleep 60; echo AFTER", timeout_s=0.5)
    assert time.monotonic() - started < 2
    assert reply.timed_out
    assert reply.exit_code is None
    assert reply.text.startswith("BEFORE\n[timed out after 0.5 s")
    assert (await bash("echo $kept")).text == "here\n"


@pytest.mark.parametrize(
    "command",
    [
        "while true; do sleep 1; done",
        "while :; do :; done",
        "python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'; sleep 60; sleep 60",
        "trap '' INT TERM HUP; while :; do :; done",
        "stty sane < /dev/tty; cat < /dev/tty",
        "exec sleep 60",
    ],
)
async def test_whatever_does_not_end_is_ended(bash, command):
    started = time.monotonic()
    reply = await bash(command, timeout_s=0.3)
    assert reply.timed_out
    assert time.monotonic() - started < 4
    after = await bash("trap - INT; echo ok")
    assert after.text == "ok\n"


async def test_a_flood_is_bounded_and_ends_in_time(bash):
    """B-15."""
    started = time.monotonic()
    reply = await bash("yes", timeout_s=0.5)
    assert reply.timed_out
    assert time.monotonic() - started < 3
    assert "bytes left out" in reply.text
    assert len(reply.text) < 70_000
    reply = await bash("head -c 100000000 /dev/zero | tr '\\0' x; echo; echo LAST LINE >&2", timeout_s=60)
    assert reply.text.endswith("LAST LINE\n")
    assert "bytes left out" in reply.text
    assert (await bash("echo ok")).text == "ok\n"


async def test_binary_output_is_an_answer_too(bash):
    reply = await bash("head -c 200000 /dev/urandom; cat /bin/true")
    assert reply.exit_code == 0
    assert len(reply.text.encode()) < 70_000


async def test_background_processes_live_and_never_hold_a_call(bash):
    """B-16."""
    started = time.monotonic()
    first = await bash(
        "(while :; do date +%s%N > /tmp/tick.new; mv /tmp/tick.new /tmp/tick; sleep 0.1; done) & echo started"
    )
    second = await bash("setsid sleep 100 & echo s2")
    assert time.monotonic() - started < 2
    assert "started\n" in first.text
    assert "s2\n" in second.text
    await bash("until [ -e /tmp/tick ]; do sleep 0.02; done")
    watch = await bash("a=$(cat /tmp/tick); sleep 0.5; [ $a != $(cat /tmp/tick) ] && echo alive")
    assert watch.text.endswith("alive\n")
    await bash("kill %1")


async def test_what_background_processes_print_is_told_apart(bash):
    await bash("(sleep 0.2; echo LATE) &")
    await bash("sleep 0.05; : # the next call comes after it", timeout_s=5)
    reply = None
    for _ in range(50):
        reply = await bash("sleep 0.02; echo mine")
        if "LATE" in reply.text:
            break
    assert "LATE" in reply.text


async def test_a_redirected_shell_is_put_right(bash):
    """B-19."""
    assert (await bash("exec 1>/dev/null 2>&1")).exit_code == 0
    assert (await bash("echo visible")).text == "visible\n"
    await bash("exec 0</dev/zero; exec 2>&-")
    assert "nosuch" in (await bash("nosuch")).text


async def test_a_deleted_working_directory_is_survived(bash):
    """B-20."""
    await bash("mkdir -p /tmp/d && cd /tmp/d && rm -rf /tmp/d")
    assert not (await bash("ls")).timed_out
    assert (await bash("cd / && pwd")).text == "/\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("set -e; false; echo never", 1),
        ("exec true", 0),
        ("kill -9 $$", -9),
        ("exec 3<&0; kill -HUP $$", -1),
    ],
)
async def test_the_end_of_the_shell_is_told_and_a_new_one_started(bash, command, code):
    await bash("cd /usr; gone=1")
    started = time.monotonic()
    reply = await bash("echo out; " + command)
    assert reply.text.startswith("out\n")
    assert "a new one was started in /usr: variables, functions and aliases are gone" in reply.text
    assert "never" not in reply.text
    assert reply.exit_code == code
    assert time.monotonic() - started < 3
    assert (await bash("pwd; echo ${gone-unset}")).text == "/usr\nunset\n"


@pytest.mark.parametrize("command", ["suspend", "kill -STOP $$", "kill -STOP 0", "sleep 9 & kill -STOP -1; kill -9 %1"])
async def test_a_stopped_shell_goes_on(bash, command):
    started = time.monotonic()
    assert (await bash(f"{command}; echo on")).text == "on\n"
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "command",
    [
        "builtin() { :; }; printf() { :; }",
        "enable -n builtin printf .",
        "shopt -s extdebug; trap 'false' DEBUG",
        "cat /proc/$$/fd/10 >/dev/null & sleep 0.1; echo next",  # takes the lines that are meant for the shell
    ],
)
async def test_a_shell_that_cannot_report_is_replaced_long_before_the_timeout(bash, command):
    started = time.monotonic()
    replies = [await bash(command, timeout_s=60), await bash("echo here", timeout_s=60)]
    assert any("no longer tells when a command has ended" in reply.text for reply in replies)
    assert time.monotonic() - started < 10
    assert (await bash("echo here")).text == "here\n"


async def test_a_restricted_shell_is_replaced(bash):
    await bash("set -r")
    await bash("cd /")
    assert (await bash("cd / && pwd")).text == "/\n"


async def test_names_that_the_shell_itself_uses_may_be_redefined(bash):
    await bash(
        "set() { echo mine; }; printf() { echo mine; }; alias .=false builtin=false; IFS=x; readonly IFS PS1 PS2"
    )
    assert (await bash("echo a; (exit 4)")).text == "a\n[exit code 4]"
    assert (await bash("printf x; set -e; unalias . builtin; unset -f printf set")).text == "mine\nmine\n"


async def test_tracing_shows_the_agents_commands_only(bash):
    await bash("set -x")
    assert "211" not in (await bash("echo hi")).text
    await bash("set +x")


async def test_explicit_pagers_do_not_wait(bash):
    reply = await bash("seq 200 > /tmp/long; less /tmp/long; more /tmp/long")
    assert reply.text.split().count("200") == 2
    assert not reply.timed_out


async def test_closed_descriptors_end_the_shell_at_once(bash):
    started = time.monotonic()
    reply = await bash('for i in {3..255}; do eval "exec $i>&-"; done')
    assert "a new one was started" in reply.text
    assert time.monotonic() - started < 3
    assert (await bash("echo ok")).text == "ok\n"


async def test_errexit_does_not_outlive_its_call(bash):
    await bash("set -eu; keep=1")
    assert (await bash("false; echo $keep")).text == "1\n"
    await bash("set +u")


async def test_a_shell_that_dies_between_calls_is_told(bash):
    await bash("(sleep 0.1; kill -9 $$) &")
    await bash("sleep 0.05")
    reply = None
    for _ in range(100):
        reply = await bash("sleep 0.01; echo here")
        if "shell" in reply.text:
            break
    assert "are gone" in reply.text
    assert (await bash("echo here")).text == "here\n"


async def test_status_and_output_belong_together_many_times_over(bash):
    for number in range(300):
        reply = await bash(f"echo {number}; (exit {number % 7})")
        assert reply.text.splitlines()[0] == str(number)
        assert reply.exit_code == number % 7
