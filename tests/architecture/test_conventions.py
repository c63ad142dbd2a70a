"""House rules that no linter checks."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import ROOT, FunctionNode, Module, listing, modules

MAX_FILE_LINES = 600
LONGER_FILES = {"nblaunch.training.accelerator": 870}  # the table of contents: a docstring per public method
MAX_FUNCTION_LINES = 60

# Travels to other machines by value, and can't import nblaunch.env there.
READS_ENVIRONMENT = {"nblaunch.env", "nblaunch.engines.ray_actor"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_only_env_touches_the_environment() -> None:
    offenders = [
        f"{module.at(node)} uses os.{name}"
        for module in modules()
        if module.name not in READS_ENVIRONMENT
        for node, name in _environment_uses(module)
    ]
    assert not offenders, f"the environment is read and written by nblaunch/env.py alone:{listing(offenders)}"


def test_no_file_is_too_long() -> None:
    lengths = {module: len(module.text.splitlines()) for module in modules()}
    offenders = [
        f"{module.at(module.tree)}: {length}"
        for module, length in lengths.items()
        if length > LONGER_FILES.get(module.name, MAX_FILE_LINES)
    ]
    assert not offenders, f"files of more than {MAX_FILE_LINES} lines; split them:{listing(offenders)}"


def test_no_function_is_too_long() -> None:
    offenders = [
        f"{module.at(function)} {function.name}: {length}"
        for module in modules()
        for function in module.functions()
        if (length := _length(function)) > MAX_FUNCTION_LINES
    ]
    assert not offenders, (
        f"functions of more than {MAX_FUNCTION_LINES} lines; split them:{listing(offenders)}"
    )


def test_no_handler_swallows_all_errors() -> None:
    offenders = [
        f"{module.at(node)} catches {_caught(node) or 'everything'} and passes"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node) and _does_nothing(node.body)
    ]
    assert not offenders, f"name the exceptions that may be ignored, and say why:{listing(offenders)}"


def test_no_simple_queue_is_read_with_a_timeout() -> None:
    offenders = [
        module.at(node)
        for module in modules()
        if "SimpleQueue" in module.text
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if any(keyword.arg == "timeout" for keyword in node.keywords)
    ]
    assert not offenders, (
        "before Python 3.13, SimpleQueue.get(timeout=...) waits forever if a signal handler outlasts the timeout; use "
        f"queue.Queue or a lock:{listing(offenders)}"
    )


def test_every_module_has_a_docstring() -> None:
    offenders = [
        module.at(module.tree)
        for module in modules()
        if module.text.strip() and not ast.get_docstring(module.tree)
    ]
    assert not offenders, f"modules without a docstring:{listing(offenders)}"


def _environment_uses(module: Module) -> list[tuple[ast.AST, str]]:
    uses: list[tuple[ast.AST, str]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            if isinstance(node.value, ast.Name) and node.value.id in ("os", "posix"):
                uses.append((node, node.attr))
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            uses += [(node, alias.name) for alias in node.names if alias.name in ENVIRONMENT]
    return uses


def _length(function: FunctionNode) -> int:
    """Return the number of lines of a function without its docstring, because the limit is for code, not for
    explanations.
    """
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def _caught(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type else ""


def _catches_all(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(t is None or ast.unparse(t) in ("Exception", "BaseException") for t in types)


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def test_tools_check_the_oldest_supported_python() -> None:
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    promised = re.search(r'^requires-python = ">=3\.(\d+)"$', project, re.MULTILINE)
    assert promised is not None
    asked = {
        "ruff": re.findall(r'^target-version = "py3(\d+)"$', project, re.MULTILINE),
        "mypy": re.findall(r'^python_version = "3\.(\d+)"$', project, re.MULTILINE),
        "vermin": re.findall(r"vermin .*--target=3\.(\d+)-", makefile),
        "classifiers": re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)[:1],
    }
    assert asked == {checker: [promised[1]] for checker in asked}
