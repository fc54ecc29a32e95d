# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: imports go one way, and no file imports itself by a way around."""

import ast
from pathlib import Path

import pytest
from package_modules import MODULES

ROOT = Path(__file__).parents[2]

# What a room may import is itself and what stands before it.
ROOMS = ("layout", "checks", "native", "ops", "cache", "compat", "models", "testing")
# The same of the rooms of the models. Nobody but the command imports `evaluation`.
MODEL_ROOMS = (
    *("_packages", "progress", "status"),
    *("decoder", "checkpoint", "testing", "distributed", "serving", "evaluation", "server", "cli"),
    "",
)


def imports(module: str) -> set[str]:
    """The modules of ours that a module imports when it is imported itself."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in _at_import(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names if names <= MODULES.keys() else {source, *names}
    return found & MODULES.keys() - {module}


def _at_import(tree: ast.AST):
    """Nodes that run at import: not in functions, and not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if is_for_types and "not" not in ast.unparse(node.test):
            continue
        yield node
        yield from _at_import(node)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def model_room(module: str) -> str:
    return module.split(".")[2] if module.count(".") > 1 else ""


def in_rooms():
    return [module for module in MODULES if room(module) in ROOMS]


@pytest.mark.every
@pytest.mark.parametrize("module", in_rooms())
def test_no_room_imports_one_above_it(module):
    allowed = ROOMS[: ROOMS.index(room(module)) + 1]
    if room(module) in ("models", "testing"):  # users of the package, and parts of the command
        allowed = (*allowed, "", "_start")
    assert {room(name) for name in imports(module)} <= {*allowed}


@pytest.mark.every
@pytest.mark.parametrize("module", [m for m in MODULES if room(m) == "models"])
def test_no_room_of_the_models_imports_one_above_it(module):
    assert model_room(module) in MODEL_ROOMS
    allowed = {*MODEL_ROOMS[: MODEL_ROOMS.index(model_room(module)) + 1]}
    # Of the evaluation what lm-eval runs alone generates.
    if model_room(module) == "evaluation" and not module.endswith(".lm_eval"):
        allowed.remove("serving")
    theirs = {name for name in imports(module) if room(name) == "models"}
    assert {model_room(name) for name in theirs} <= allowed


def test_no_module_imports_itself_by_a_way_around():
    graph = {module: imports(module) for module in MODULES if module != "jax_paged"}
    done: set[str] = set()

    def visit(module, way):
        assert module not in way, " → ".join([*way[way.index(module) :], module])
        if module in done or module not in graph:
            return
        for other in sorted(graph[module]):
            # A package's file runs before its modules do: what it imports of them is no cycle.
            if not (other.startswith(f"{module}.") or module.startswith(f"{other}.")):
                visit(other, [*way, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def test_only_models_import_flax():
    for module, path in MODULES.items():
        if room(module) != "models":
            text = path.read_text(encoding="utf-8")
            assert "import flax" not in text, module
            assert "from flax" not in text, module


def test_no_test_imports_another():
    tests = sorted(ROOT.glob("tests/**/test_*.py"))
    assert len(tests) > 90
    names = {path.stem for path in tests}
    assert len(names) == len(tests), "two files of one name"
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not modules & names, path


def test_every_file_is_in_a_room():
    files = {module for module in MODULES if room(module) not in (*ROOMS, "_start")}
    assert files == {"jax_paged", "jax_paged.__main__"}
