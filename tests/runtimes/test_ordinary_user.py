"""The contract and Apptainer's own promises, with service and tests run by a fresh ordinary user of this host."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
RUN = """
set -eu
for place in "$INTERPRETER" "$CHECKOUT" "$IMAGES"; do  # what lies in a closed home is shown at a place of its own
    mkdir -p "$WORK/keep$place"; mount --rbind "$place" "$WORK/keep$place"
done
mount -t tmpfs -o mode=0755 none "$HOME"
for place in "$INTERPRETER" "$CHECKOUT" "$IMAGES"; do
    mkdir -p "$place"; mount --rbind "$WORK/keep$place" "$place"
done
unset HOME
cd "$CHECKOUT"
exec setpriv --reuid "$USER_NAME" --regid "$USER_NAME" --init-groups -- env HOME="$USER_HOME" "$@"
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A user with a home, made by useradd, which also gives it its lines in /etc/subuid and /etc/subgid."""
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("making a user takes root and useradd")
    name, home = f"prorl-{secrets.token_hex(4)}", Path("/var/tmp") / f"prorl-{secrets.token_hex(4)}"
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), "--shell", "/bin/sh", name], check=True)
    try:
        yield name, home
    finally:
        subprocess.run(["userdel", name], check=True)
        shutil.rmtree(home)


def run_as(user: tuple[str, Path], work: Path, images: Path, *command: str) -> subprocess.CompletedProcess[str]:
    name, home = user
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(Path.home()), "USER_NAME": name, "USER_HOME": str(home),
        "INTERPRETER": sys.base_prefix, "CHECKOUT": str(ROOT), "IMAGES": str(images), "WORK": str(work),
        "PRORL_GYM_TEST_IMAGES": str(images),
    }  # fmt: skip
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", RUN, "run", *command],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("sub_ids", [True, False])
def test_everything_holds_for_an_ordinary_user(user, tmp_path, images, sub_ids):
    """Without sub-ids `--fakeroot` still gives root alone, which is enough for all but packages with users."""
    if not sub_ids:
        take_sub_ids(user[0])
    before = set(Path("/var/lib/apptainer/mnt/session").iterdir())
    chosen = [] if sub_ids else ["-k", "fakeroot and not install"]
    pytest_as_user = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "apptainer", *chosen,
        "--basetemp", f"{user[1]}/tests", "tests/runtimes/test_contract.py", "tests/runtimes/test_limits.py",
        "tests/runtimes/test_apptainer.py",
    ]  # fmt: skip
    done = run_as(user, tmp_path, images, *pytest_as_user)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    users_processes = subprocess.run(["ps", "-u", user[0], "-o", "stat,args"], capture_output=True, text=True)
    assert not [line for line in users_processes.stdout.splitlines()[1:] if not line.startswith("Z")]
    assert set(Path("/var/lib/apptainer/mnt/session").iterdir()) == before
    assert not [path for path in user[1].iterdir() if "apptainer" in path.name or "singularity" in path.name]


def take_sub_ids(name: str) -> None:
    for kind in ("uid", "gid"):
        for line in Path(f"/etc/sub{kind}").read_text().splitlines():
            owner, first, count = line.split(":")
            if owner == name:
                last = int(first) + int(count) - 1
                subprocess.run(["usermod", f"--del-sub{kind}s", f"{first}-{last}", name], check=True)
