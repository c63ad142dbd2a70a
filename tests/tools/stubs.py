"""Write the stubs of ``nblaunch``, which imports its names lazily, and of Accelerate's module names: ``make stubs``.

Type checkers and editors read them; Python itself does not.
"""

from __future__ import annotations

from pathlib import Path

from nblaunch.compat.names import FILES, HOMES, PUBLIC

ROOT = Path(__file__).parents[2]
MODULES = ("nblaunch", *FILES)

_ALSO_IN_ROOT = """
__version__: str

def load_ipython_extension(shell: object) -> None: ...
"""


def path_of(module: str) -> Path:
    """Return the stub's file of a module, as ``nblaunch.utils``."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.pyi" if module == "nblaunch" else path.with_suffix(".pyi")


def stub_of(module: str) -> str:
    """Return the text of a module's stub."""
    homes: dict[str, list[str]] = {}
    for name, home in (PUBLIC if module == "nblaunch" else HOMES[module]).items():
        homes.setdefault(home, []).append(name)
    lines = ["# Written by `make stubs` from nblaunch/compat/names.py."]
    for home, names in sorted(homes.items()):
        lines.append(f"from {home} import (")
        lines += [f"    {name} as {name}," for name in sorted(names)]
        lines.append(")")
    return "\n".join(lines) + "\n" + (_ALSO_IN_ROOT if module == "nblaunch" else "")


def main() -> None:
    """Write all stubs."""
    for module in MODULES:
        path_of(module).write_text(stub_of(module), encoding="utf-8")


if __name__ == "__main__":
    main()
