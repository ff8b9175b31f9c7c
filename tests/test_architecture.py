"""The house rules that a machine can hold: who may import whom, and how long a file may be."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "policies": set(),
    "cache": {"policies"},
    "engine": {"cache", "policies"},
    "gateway": {"cache", "policies"},
    "loadtest": {"policies"},
}
PURE = "policies"
NOT_PURE = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "os",
    "pathlib",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
}
PARTS = {"starlette", "pydantic-core"}  # of what is declared
MAX_LINES = 400


def source_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of every module imported anywhere in a file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -node.level + 1 or None] if node.level else []
            yield ".".join([*above, *([node.module] if node.module else [])])


def imported(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def forbidden(folder: str, modules: set[str]) -> set[str]:
    """What a file in a folder imports from folders it may not."""
    return {
        name
        for name in modules
        if (top := name.split(".")[0]) in MAY_IMPORT and top not in {folder, *MAY_IMPORT[folder]}
    }


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_directions_of_the_house(folder: str):
    wrong = {
        str(path.relative_to(ROOT)): bad for path in source_files(folder) if (bad := forbidden(folder, imported(path)))
    }
    assert not wrong


def test_policies_are_pure():
    wrong = {}
    for path in source_files(PURE):
        tops = {name.split(".")[0] for name in imported(path)}
        if bad := (tops - sys.stdlib_module_names - {PURE}) | (tops & NOT_PURE):
            wrong[path.name] = bad
    assert not wrong


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (
            ("policies", "cache", "gateway"),
            {"compression", "jinja2", "lmcache", "msgpack", "numpy", "opentelemetry", "tokenizers", "torch", "zmq"},
        ),
        (("engine",), set()),
    ],
)
def test_what_is_imported_is_installed(folders: tuple[str, ...], extras: set[str]):
    """By ``make serve``: the dependencies and the extra ``engine``. ``extras``: what the gateway can do without."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    names = {re.split(r"[^A-Za-z0-9._-]", item)[0].lower().replace("_", "-") for item in declared}
    providers = packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)}: {top}"
        for path in source_files(*folders)
        for top in {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - set(MAY_IMPORT) - extras
        if not {found.lower().replace("_", "-") for found in providers.get(top, [top])} & (names | PARTS)
    }
    assert not missing


def test_nothing_outside_tests_imports_tests():
    assert not [
        path for path in source_files(*MAY_IMPORT) if any(name.split(".")[0] == "tests" for name in imported(path))
    ]


def test_the_directions_have_no_circle():
    def reachable(folder: str) -> set[str]:
        return MAY_IMPORT[folder].union(*(reachable(other) for other in MAY_IMPORT[folder]))

    assert not [folder for folder in MAY_IMPORT if folder in reachable(folder)]


def test_no_file_is_too_long():
    lines = {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in source_files(*MAY_IMPORT, "tests")}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_every_module_says_what_it_is_for():
    assert not [
        str(path.relative_to(ROOT))
        for path in source_files(*MAY_IMPORT, "tests")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]


class TestTheRulesCanFail:
    def test_an_import_inside_a_function_counts(self):
        assert set(imports(ast.parse("def f():\n    from engine.server import run"), "gateway")) == {"engine.server"}

    def test_relative_imports_are_made_whole(self):
        tree = ast.parse("from . import a\nfrom .b import c\nfrom ..d import e")
        assert list(imports(tree, "cache.stores")) == ["cache.stores", "cache.stores.b", "cache.d"]

    def test_a_wrong_direction_is_found(self):
        assert forbidden("gateway", {"engine.server", "cache.stores", "json"}) == {"engine.server"}
        assert forbidden("policies", {"cache"}) == {"cache"}
