"""Imports between modules. The layers themselves are import-linter contracts in pyproject.toml."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

from tests.architecture.source import Module, listing, modules
from tests.kernels import Kernel

GROUND_FLOOR = {
    f"nblaunch.{name}"
    for name in (
        "errors",
        "topology",
        "spec",
        "events",
        "env",
        "host",
        "formatting",
        "packages",
        "compat",
    )
}

# Function-level imports of our own modules, each with its reason. A new one usually means that a module is in the wrong
# layer.
OWN_IMPORTS_IN_FUNCTIONS: dict[tuple[str, str], str] = {
    ("nblaunch.notebook", "nblaunch.config.launching"): "only launch() reads configuration files",
    ("nblaunch.notebook", "nblaunch.config.settings"): "only launch() reads configuration files",
    ("nblaunch.notebook", "nblaunch.session.session"): "only session= needs it",
    ("nblaunch.notebook", "nblaunch.detached.job_process"): "only detach= needs it",
    ("nblaunch.worker.bootstrap", "nblaunch.worker.debugger"): "few workers are debugged",
    ("nblaunch.progress.plain_loops", "nblaunch.progress.board_reports"): "not every worker imports torch",
    ("nblaunch", "nblaunch.session"): "magics need IPython",
    (
        "nblaunch.cli.merge",
        "nblaunch.training.checkpoints.fsdp_states",
    ): "help and wrong uses need no torch",
    ("nblaunch.cli.launch", "nblaunch.cli.script_job"): "150 ms that help and wrong uses do not need",
    ("nblaunch.cli.jobs", "nblaunch.cli.script_job"): "only attach shows output; the list comes at once",
    ("nblaunch.notebook", "nblaunch.nodes.link"): "a launch on one machine does not load it",
    ("nblaunch.notebook", "nblaunch.engines.runner"): "a launch on one machine does not load it",
    ("nblaunch.detached.job_process", "nblaunch.engines.runner"): "a job on one machine does not load it",
    (
        "nblaunch.engines.node",
        "nblaunch.engines.node_program",
    ): "libraries read variables at their import, and these come first",
    (
        "nblaunch.dashboard.notebook",
        "nblaunch.dashboard.widget_panel",
    ): "needs ipywidgets, which may be missing",
}


def test_importing_nblaunch_loads_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import nblaunch; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    loaded = set(run.stdout.split()) - {"nblaunch"}
    # This module of Python is named after the platform, and is in no list.
    foreign = {name for name in loaded if not name.startswith("_sysconfigdata")} - sys.stdlib_module_names
    assert not foreign, f"`import nblaunch` also loads {foreign}"


def test_a_launch_on_one_machine_loads_nothing_for_several(kernel: Kernel) -> None:
    kernel.run("import sys; from nblaunch import notebook_launcher")
    kernel.run(
        "def loaded():\n"
        "    several = ('nblaunch.nodes', 'nblaunch.engines')\n"
        "    return [name for name in sys.modules if name.startswith(several)]"
    )
    cell = kernel.run("print(notebook_launcher(loaded, (), 2, return_all=True, max_restarts=1), loaded())")
    assert "[[], []] []" in cell.stdout
    kernel.run("import nblaunch.nodes.link")
    assert "nblaunch.nodes.link" in kernel.run("print(loaded())").stdout


def test_every_module_can_be_imported() -> None:
    for module in modules():
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_the_lowest_layer_imports_only_the_standard_library() -> None:
    offenders = [
        f"{module.at(node)} imports {name}"
        for module in modules()
        if module.name in GROUND_FLOOR
        for node, name in module.imports()
        if name.partition(".")[0] not in sys.stdlib_module_names | {"nblaunch"}
    ]
    assert not offenders, listing(offenders)


def test_own_modules_are_imported_at_the_top() -> None:
    found = {
        (module.name, name): module.at(node)
        for module in modules()
        for node, name in _own_imports_in_functions(module)
    }
    offenders = [
        f"{where} imports {key[1]}" for key, where in found.items() if key not in OWN_IMPORTS_IN_FUNCTIONS
    ]
    assert not offenders, f"imports of our own modules inside functions:{listing(offenders)}"
    stale = [f"{importer} -> {name}" for importer, name in OWN_IMPORTS_IN_FUNCTIONS.keys() - found.keys()]
    assert not stale, f"no longer there, take them out of OWN_IMPORTS_IN_FUNCTIONS:{listing(stale)}"


def test_module_exports_exist() -> None:
    missing = []
    for module in modules():
        if any(isinstance(node, ast.Name) and node.id == "__all__" for node in ast.walk(module.tree)):
            exports = importlib.import_module(module.name).__all__
            missing += [f"{module.name}.{name}" for name in exports if not _exists(module.name, name)]
            missing += [f"{module.name}.{name} again" for name in exports if exports.count(name) > 1]
    assert not missing, listing(missing)


def _own_imports_in_functions(module: Module) -> list[tuple[ast.AST, str]]:
    indented = [
        (node, name)
        for node, name in module.imports()
        if node.col_offset > 0 and name.partition(".")[0] == "nblaunch"
    ]
    if not indented:  # as in most modules; the next line visits the whole module, and nested functions twice
        return []
    inside = {node for function in module.functions() for node in ast.walk(function)}
    return [(node, name) for node, name in indented if node in inside]


def test_names_that_tests_import_exist() -> None:
    """This includes tests that need a device or another environment, and would otherwise fail only there."""
    missing = []
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nblaunch":
                missing += [
                    f"{path}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not _exists(node.module or "", alias.name)
                ]
    assert not missing


def _exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
