"""Agents and resources servers by path: the right class or an error that names file and fix."""

import abc
from pathlib import Path

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.rollout.loading import load_class


class Base(abc.ABC):
    @abc.abstractmethod
    def act(self) -> str: ...


HEADER = f"from {__name__} import Base\n"
GOOD = HEADER + "class Good(Base):\n    def act(self):\n        return {name!r}\n"


def write(root: Path, name: str, code: str, file: str = "app.py") -> Path:
    folder = root / "agents" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(code)
    return root


def load(*roots: Path, name: str = "a", entrypoint: str = "app.py") -> type[Base]:
    return load_class(roots, "agents", name, entrypoint, Base)[0]


def test_the_first_root_wins_and_files_of_one_name_are_modules_of_their_own(tmp_path: Path) -> None:
    first = write(tmp_path / "1", "a", GOOD.format(name="first"))
    second = write(tmp_path / "2", "a", GOOD.format(name="second"))
    write(tmp_path / "2", "b", GOOD.format(name="b"))
    assert load(first, second)().act() == "first"
    assert load(second, first)().act() == "second"
    assert load(first, second, name="b")().act() == "b"
    assert load(first, second) is load(first)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "a", "WORD = 'neighbour'\n", "words.py")
    code = HEADER + "from .words import WORD\nclass A(Base):\n    def act(self):\n        return WORD\n"
    assert load(write(tmp_path, "a", code))().act() == "neighbour"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module", "does not import.*no_such_module"),
        ("def f(:", "does not import.*SyntaxError"),
        ("x = 1", "defines no subclass of"),
        (HEADER + "class A(Base): pass", "A does not define act"),
        (GOOD.format(name="x") + GOOD.format(name="y").replace("Good", "Better"), "several.*Good, Better"),
    ],
)
def test_what_cannot_be_loaded_names_the_file_and_the_reason(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)agents/a/app\.py.*{says}"):
        load(write(tmp_path, "a", code))


@pytest.mark.parametrize(
    ("name", "entrypoint"), [("../a", "app.py"), ("a", "/etc/passwd.py"), ("a", "../a/app.py"), ("a", "app.sh")]
)
def test_nothing_outside_the_folder_is_loaded(tmp_path: Path, name: str, entrypoint: str) -> None:
    with pytest.raises(ConfigError, match="relative"):
        load(write(tmp_path, "a", GOOD.format(name="x")), name=name, entrypoint=entrypoint)


def test_a_missing_one_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/agents/nope/app\.py.*PRORL_GYM_ROOTS"):
        load(tmp_path, name="nope")
