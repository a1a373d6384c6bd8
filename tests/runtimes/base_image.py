"""A small Debian with Python and dpkg, as folder and .sif: made once per machine, in ~/.cache/prorl_gym."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SUITE, PACKAGES = "bookworm", "python3-minimal"
_VERSION = "1"


def base_image() -> Path:
    """The folder with `base.sif` and `base`, which is the same unpacked, readable by every user."""
    for program in ("apptainer", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: scripts/install_apptainer.sh")
    if given := os.environ.get("PRORL_GYM_TEST_IMAGES"):
        return Path(given)
    cache = Path.home() / ".cache/prorl_gym/test-images"
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / f"{SUITE}-{_VERSION}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            partial = Path(tempfile.mkdtemp(dir=cache))
            try:
                _make(partial)
                partial.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return final


def _make(folder: Path) -> None:
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")]
    root = folder / "base"
    command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={PACKAGES}", *excluded, SUITE, str(root)]
    subprocess.run(command, check=True)
    for node in (root / "dev").iterdir():  # device nodes, which no sandbox could use
        if not node.is_dir() or node.is_symlink():
            node.unlink()
    (root / "etc/marker").write_text("the image's own\n")
    for path in (folder, root):
        path.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    own = {"HOME": str(work), "APPTAINER_CONFIGDIR": str(work), "APPTAINER_CACHEDIR": str(work)}
    quick = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
    subprocess.run(
        ["apptainer", "--silent", "build", *quick, str(folder / "base.sif"), str(root)],
        env={"PATH": os.environ["PATH"], **own},
        check=True,
    )
    shutil.rmtree(work)
