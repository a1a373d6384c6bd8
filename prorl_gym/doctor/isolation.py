"""One job's sandbox against another's, and against the service."""

import glob
import os
from pathlib import Path

from prorl_gym.doctor import inside
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.doctor.subject import Neighbours, ask
from prorl_gym.errors import SandboxError

_REPORT = (
    "do not serve untrusted agents with this runtime on this host: choose another one, update bwrap or apptainer, and "
    "report it with this output"
)


async def processes_are_hidden(pair: Neighbours) -> Finding:
    """Neither another job's processes nor the service's are seen."""
    name = "other processes"
    if not pair.separate:
        return _unisolated(pair, name, "the sandbox shares the host's process ids")
    if not await ask(pair.second, inside.sees_own_processes):
        return failed(name, "/proc inside is the host's, though process ids are not", _REPORT)
    await ask(pair.first, inside.leaves_processes, 1)
    found = await ask(pair.second, inside.processes_with, pair.marker)
    if found:
        return failed(name, f"{len(found)} processes of another job are seen inside", _REPORT)
    return ok(name, "none of another job's or of the service's is seen: process ids of its own")


async def files_are_hidden(pair: Neighbours) -> Finding:
    """Neither another job's files nor the service's state are seen."""
    name = "other files"
    planted = await ask(pair.first, inside.plant, pair.marker)
    try:
        places = [*planted, *_on_host(pair), *pair.subject.state_folders(), "/etc/shadow"]
        found = await ask(pair.second, inside.readable, places)
    finally:
        await ask(pair.first, inside.uproot, planted)
    if not found:
        return ok(name, f"another job's ({len(planted)} places), paths.state and /etc/shadow cannot be read")
    return _unisolated(pair, name, f"can be read inside: {', '.join(found)}")


async def environment_is_clean(pair: Neighbours) -> Finding:
    """What stands in the service's environment stands in none inside."""
    name = "host's environment"
    found = await ask(pair.second, inside.processes_with, pair.host_marker)
    if not found:
        return ok(name, "none of the service's variables is seen inside")
    return _unisolated(pair, name, "the service's variables can be read inside")


async def tool_server_is_out_of_reach(pair: Neighbours) -> Finding:
    """The agent can neither look into its own tool server nor end it."""
    name = "tool server"
    if not pair.separate:
        return _unisolated(pair, name, "not attacked: the sandbox shares the host's process ids")
    try:
        done = await ask(pair.second, inside.attacks_tool_server)
        await ask(pair.second, inside.pid_namespace)
    except SandboxError as error:
        return failed(name, f"it was killed from inside: {error}", _REPORT)
    if done:
        return failed(name, f"within the agent's reach: {', '.join(done)}", _REPORT)
    return ok(name, "its memory and descriptors are closed to the agent, a SIGKILL from inside does nothing")


async def user_is_unprivileged(pair: Neighbours) -> Finding:
    """On the host the agent is nobody who matters."""
    name = "host user"
    uids = [_uid_of(sandbox.describe().pid) for sandbox in (pair.first, pair.second)]
    own = os.geteuid()
    if None in uids:
        return failed(name, "the sandbox's process cannot be looked at", "mount /proc without hidepid for the service")
    if own != 0:
        return ok(name, f"uid {uids[0]}, the service's own, which is not root")
    if 0 not in uids and len(set(uids)) == len(uids):
        return ok(name, f"an unprivileged uid of its own per sandbox ({uids[0]}, {uids[1]}), none of them root's")
    words = f"sandboxes run as uid {uids[0]} and {uids[1]} of the host"
    fix = "run the service as an ordinary user"
    if "user" in pair.first.describe().unenforced:
        return note(name, f"{words}: this host lets the service give them none of their own", fix)
    return failed(name, words, fix)


def _unisolated(pair: Neighbours, name: str, words: str) -> Finding:
    if "isolation" in pair.second.describe().unenforced:
        return note(name, f"nothing is isolated: {words}", "choose runtime=bubblewrap or runtime=apptainer")
    return failed(name, words, _REPORT)


def _on_host(pair: Neighbours) -> list[str]:
    """The first sandbox's planted files by their paths on the host, where they are on a disk of it."""
    return [path for place in pair.subject.state_folders() for path in glob.glob(f"{place}/*/*/{pair.marker}")]


def _uid_of(pid: int | None) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))
    except (OSError, ValueError, StopIteration):
        return None
