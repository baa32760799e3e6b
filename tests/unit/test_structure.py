"""Measures of the source itself: sizes, docstrings, and who may read the environment.

Who may import whom is import-linter's part (`make check`), except for what it cannot say:
"standard library only".
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
SETTINGS = "cluster/outrider_cluster/settings.py"
ENVIRONMENT_SETTERS = {"update", "setdefault", "pop"}

MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ("cluster", "services")
    for path in (ROOT / top).rglob("*.py")
    if "_pb2" not in path.name
)


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read an environment variable. Setting one for a child or a library is no read."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if {alias.name for alias in node.names} & {"environ", "environb", "getenv", "getenvb"}:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in {"getenv", "getenvb"}:
            yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in {"environ", "environb"}:
            parent = parents[node]
            stores = isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
            sets = isinstance(parent, ast.Attribute) and parent.attr in ENVIRONMENT_SETTERS
            if not (stores or sets):
                yield node.lineno


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_walk_finds_the_packages() -> None:
    assert "services/outrider/core/verdict.py" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_module_and_functions_stay_small(module: str) -> None:
    lines = (ROOT / module).read_text().count("\n")
    assert lines <= MAX_MODULE_LINES
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(parse(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_docstring(module: str) -> None:
    tree = parse(module)
    assert not tree.body or ast.get_docstring(tree)


@pytest.mark.parametrize("module", MODULES)
def test_module_does_not_print(module: str) -> None:
    calls = [node for node in ast.walk(parse(module)) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"] == []


@pytest.mark.parametrize("module", [module for module in MODULES if module != SETTINGS])
def test_environment_is_read_in_settings_only(module: str) -> None:
    assert list(environment_reads(parse(module))) == []


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("services/outrider/core/")])
def test_core_imports_the_standard_library_only(module: str) -> None:
    foreign = {
        name
        for name in imported_modules(parse(module))
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("outrider.core")
    }
    assert foreign == set()


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.environ.get('A')",
        "import os\nx = dict(os.environ)",
        "import os\nx = os.environ.copy()",
        "import os\nx = 'A' in os.environ",
        "import os\nx = os.getenv('A')",
        "from os import environ",
        "from os import getenv",
    ],
)
def test_a_read_of_the_environment_is_found(source: str) -> None:
    assert list(environment_reads(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.update(A='1')",
        "import os\nos.environ.setdefault('A', '1')",
        "import os\ndel os.environ['A']",
    ],
)
def test_setting_the_environment_is_no_read(source: str) -> None:
    assert not list(environment_reads(ast.parse(source)))
