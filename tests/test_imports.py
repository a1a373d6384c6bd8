"""Imports point down only, in the order of `LAYERS`, and heavy libraries stay out of module tops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "prorl_gym"

LAYERS = [
    {"types", "errors"},
    {"config", "logs", "daemon_thread"},
    {"tokens", "backends", "runtimes"},
    {"tools"},
    {"resources"},
    {"rollout"},
    {"handlers"},
    {"pipeline"},
    {"server"},
    {"cli", "commands", "doctor", "__main__"},
]
"""From the bottom up: a part imports its own layer and those below."""

CLOSED = {
    "client": {"types", "errors"},
    "embedded": {"types", "errors"},
    "toolserver": set(),
}
"""Parts that stand beside the layers, with all that they may import of the package."""

LENT_BELOW = {("config", "runtimes.base"), ("runtimes", "tools.spec")}
"""Single modules of a higher layer that hold only types."""

HEAVY = {
    "torch",
    "transformers",
    "renderers",
    "math_verify",
    "ray",
    "vllm",
    "verl",
    "gguf",
    "accelerate",
    "safetensors",
}
CLIENT_LIBRARIES = {"httpx", "pydantic"}
OUTSIDE = {"agents", "resources_servers", "training_recipes"}


class Import(NamedTuple):
    source: Path
    line: int
    module: str
    top: bool

    def __str__(self) -> str:
        return f"{self.source.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(source: Path) -> Iterator[Import]:
    """All imports of a file; `top` tells those that run when the module is imported."""
    package = source.relative_to(ROOT).with_suffix("").parts[:-1]

    def visit(node: ast.AST, top: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, node.lineno, alias.name, top)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield Import(source, node.lineno, module, top)
            for alias in node.names:  # `from package import module`
                if _is_module(f"{module}.{alias.name}"):
                    yield Import(source, node.lineno, f"{module}.{alias.name}", top)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        else:
            inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner)

    yield from visit(ast.parse(source.read_text(), str(source)), True)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def part_of(source: Path) -> str:
    return source.relative_to(PACKAGE).with_suffix("").parts[0]


def layer_of(part: str) -> int | None:
    return next((number for number, parts in enumerate(LAYERS) if part in parts), None)


ALL = [found for source in sorted(PACKAGE.rglob("*.py")) for found in imports_of(source)]


def own_imports() -> Iterator[tuple[Import, str, str]]:
    """Imports of the package by itself: the import, the importing part, the imported part."""
    for found in ALL:
        parts = found.module.split(".")
        if parts[0] == "prorl_gym" and len(parts) > 1:
            yield found, part_of(found.source), parts[1]


def test_every_part_has_its_place() -> None:
    known = {"testing", "__init__", *CLOSED}.union(*LAYERS)
    parts = {part_of(source) for source in PACKAGE.rglob("*.py")}
    assert parts <= known, f"{sorted(parts - known)} stand in no layer of this test"


def test_imports_point_down() -> None:
    upward = []
    for found, source, target in own_imports():
        here, there = layer_of(source), layer_of(target)
        if source in {"testing", *CLOSED} or source == target:
            continue
        lent = (source, ".".join(found.module.split(".")[1:])) in LENT_BELOW
        if here is not None and there is not None and there > here and not lent:
            upward.append(str(found))
    assert not upward


@pytest.mark.parametrize("part", sorted(CLOSED))
def test_parts_that_stand_beside_import_little(part: str) -> None:
    assert not [
        str(found) for found, source, target in own_imports() if source == part and target not in {part, *CLOSED[part]}
    ]


def test_the_core_imports_neither_test_kit_nor_client_nor_embedded_server() -> None:
    beside = {"testing", "client", "embedded"}
    allowed = {"cli", "commands", "__main__", *beside}  # the command line drives them
    assert not [
        str(found)
        for found, source, target in own_imports()
        if target in beside and source != target and (source not in allowed or target == "testing")
    ]


def test_the_package_knows_no_environment_agent_or_recipe_by_name() -> None:
    assert not [str(found) for found in ALL if found.module.split(".")[0] in OUTSIDE]


def test_heavy_libraries_are_imported_inside_functions() -> None:
    assert not [
        str(found)
        for found in ALL
        if found.top
        and found.module.split(".")[0] in HEAVY
        and part_of(found.source) not in {"embedded", "toolserver"}  # processes of their own
    ]


def test_the_client_needs_httpx_and_pydantic_only() -> None:
    import sys

    own = {"client", "types", "errors", "__init__"}
    foreign = [
        str(found)
        for found in ALL
        if part_of(found.source) in own
        and found.module.split(".")[0] not in {"prorl_gym", *CLIENT_LIBRARIES, *sys.stdlib_module_names}
    ]
    assert not [line for line in foreign if "pydantic_core" not in line]
