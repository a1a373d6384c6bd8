"""What does not depend on a kind of sandbox: room, descriptors, namespaces, who may command the service."""

import asyncio
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from prorl_gym.config.models import ProrlConfig
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.errors import ConfigError
from prorl_gym.server.service import read_token, refuse_open_door

_FILES_PER_JOB = 8
_FILES_OF_THE_SERVICE = 200
_NEEDED_BYTES = 1 << 30
_UNSHARE_S = 10.0
_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and ctypes.get_errno())"
_SYSCTLS = {
    "user/max_user_namespaces": "user.max_user_namespaces=15000",
    "kernel/unprivileged_userns_clone": "kernel.unprivileged_userns_clone=1",
    "kernel/apparmor_restrict_unprivileged_userns": "kernel.apparmor_restrict_unprivileged_userns=0",
}


async def open_files(config: ProrlConfig) -> Finding:
    """Enough for as many jobs as the pools take at once; the service raises its limit as far as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pools = config.pipeline
    ahead = pools.ready_ahead or pools.run.workers
    jobs = ahead + pools.run.workers + pools.eval.workers
    wanted = _FILES_OF_THE_SERVICE + _FILES_PER_JOB * jobs
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} allowed"
        return ok("open files", f"{limit}, {wanted:,} wanted for {jobs:,} jobs at once")
    fix = f"ulimit -Hn {wanted} (LimitNOFILE= of a unit, nofile in /etc/security/limits.conf), or fewer workers"
    return failed("open files", f"{hard:,} allowed, {wanted:,} wanted for {jobs:,} jobs at once", fix)


async def disk_space(config: ProrlConfig) -> Finding:
    """Of `paths.state`."""
    folder = _existing(config.paths.state)
    free = shutil.disk_usage(folder).free
    share = (config.runtime.limits.disk_mb or 0) << 20
    words = f"{free / 1e9:.1f} GB free for paths.state={config.paths.state}"
    if share:
        words += f", as much as {free // share:,} sandboxes of limits.disk_mb={config.runtime.limits.disk_mb} may fill"
    if free < _NEEDED_BYTES:
        return failed("disk space", words, "make room, or set paths.state to a node-local folder that has some")
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "set paths.state to a node-local folder of your own"
        return failed("disk space", f"{folder} cannot be written by this user", fix)
    return ok("disk space", words, free_gb=round(free / 1e9, 1))


async def user_namespaces(config: ProrlConfig) -> Finding:
    """Whether an ordinary process may make one; each kind's own row says whether its sandboxes start."""
    name = "user namespaces"
    command = [sys.executable, "-I", "-S", "-c", _UNSHARE]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=_UNSHARE_S, check=False)
    settings = {key: value for key in _SYSCTLS if (value := _sysctl(key)) is not None}
    told = ", ".join(f"{key.replace('/', '.')}={value}" for key, value in settings.items())
    if done.returncode == 0:
        return ok(name, f"can be made ({told or 'no sysctl restricts them'})")
    wishes = " ".join(_SYSCTLS[key] for key in settings) or "user.max_user_namespaces=15000"
    return note(
        name, f"refused: {os.strerror(done.returncode)} ({told or 'by no sysctl'})",
        f"as root: sysctl -w {wishes}; in a container, one whose seccomp profile allows unshare",
    )  # fmt: skip


async def access(config: ProrlConfig) -> Finding:
    """Whether `serve` would take this configuration where sandboxes could command it."""
    try:
        token = read_token(config)
        refuse_open_door(config, token)
    except ConfigError as error:
        cause, _, fix = str(error).partition("; ")
        return failed("access", cause, fix or "see server.token_env")
    if token is not None:
        return ok("access", f"the bearer token in ${config.server.token_env} is asked for")
    if config.server.insecure:
        fix = "set server.token_env=NAME (bearer token in $NAME)"
        return note("access", "server.insecure=true: anybody who reaches the port commands the service", fix)
    return ok("access", "no token is asked for, and no sandbox has the host's network")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _sysctl(key: str) -> str | None:
    try:
        return Path("/proc/sys", key).read_text().strip()
    except OSError:
        return None


HOST_CHECKS = {"open files": open_files, "disk space": disk_space, "user namespaces": user_namespaces, "access": access}
