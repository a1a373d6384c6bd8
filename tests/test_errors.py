"""The tree at the top of errors.py is the tree of its classes."""

import re

from prorl_gym import errors

LINE = re.compile(
    r"^    (?P<branches>[ │├└]*)(?P<name>[A-Z]\w+)(?P<second_base>\(\w+\))?(?: +(?P<status>\d{3}))?(?: .*)?$"
)


def test_the_drawn_tree_is_the_one_there_is() -> None:
    drawn: list[tuple[str, str]] = []
    above: list[str] = []
    for found in filter(None, map(LINE.match, (errors.__doc__ or "").splitlines())):
        depth = len(found["branches"]) // 4 if found["branches"] else -1
        del above[depth + 1 :]
        if above:
            drawn.append((found["name"], above[-1]))
        above.append(found["name"])
        if found["status"]:
            assert getattr(errors, found["name"]).status == int(found["status"])
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    real = [(each.__name__, each.__bases__[0].__name__) for each in classes if each is not errors.ProrlGymError]
    assert sorted(drawn) == sorted(real)
