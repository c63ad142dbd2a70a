"""Directives that generate parts of the reference from the package, so that they are always complete.

.. public-names::                   a section for each module with Accelerate's names, with an entry for each name
.. command-help::                   a section for each command, with the output of its ``--help``
.. environment-variables::          the table of environment variables that nblaunch reads
"""

from __future__ import annotations

import importlib
import inspect
import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import nblaunch
from nblaunch import cli, compat, env


class PublicNames(SphinxDirective):
    """An entry for each name of each module; a name that ``nblaunch`` also has becomes a reference to it."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for module in compat.FILES:
            lines += heading(module)
            lines += [line for name in sorted(compat.HOMES[module]) for line in entry(module, name)]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def heading(title: str) -> list[str]:
    """Return the lines of a section's heading."""
    return [title, "-" * len(title), ""]


def entry(module: str, name: str) -> Iterator[str]:
    """Yield the lines of reStructuredText that describe one name."""
    value = getattr(importlib.import_module(module), name)
    if name in nblaunch.__all__:
        yield f".. py:attribute:: {module}.{name}"
        yield ""
        yield f"   The same as :py:obj:`nblaunch.{name}`."
    elif isinstance(value, dict):  # autodoc would describe the class dict
        yield f".. py:data:: {module}.{name}"
    else:
        yield f".. auto{kind_of(value)}:: {module}.{name}"
        if inspect.isclass(value):
            yield "   :members:"
    yield ""


def kind_of(value: Any) -> str:
    """Return the name of the autodoc directive that describes a value."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "data"


class CommandHelp(SphinxDirective):
    """A section for each command, with the output of its ``--help``."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for command in cli.COMMANDS:
            shown = (f"   {line}" for line in help_of(command).splitlines())
            lines += [*heading(f"nblaunch {command}"), ".. code-block:: text", "", *shown, ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class EnvironmentVariables(SphinxDirective):
    """The table of environment variables."""

    def run(self) -> list[nodes.Node]:
        rows = [(f"``{row.name}``", row.meaning) for row in env.TABLE.values()]
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - variable", "     - meaning"]
        for name, meaning in rows:
            lines += [f"   * - {name}", f"     - {meaning}"]
        return self.parse_text_to_nodes("\n".join(lines))


def help_of(command: str) -> str:
    """Return the output of ``nblaunch <command> --help``, 100 columns wide."""
    shown = io.StringIO()
    with env.patched({"COLUMNS": "100"}), redirect_stdout(shown), suppress(SystemExit):
        cli.main([command, "--help"])
    return shown.getvalue()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("environment-variables", EnvironmentVariables)
    return {"parallel_read_safe": True}
