"""Write the stubs of Accelerate's module names, which have no files: ``make stubs``.

Type checkers and editors read them; Python itself does not.
"""

from __future__ import annotations

from pathlib import Path

from nblaunch.compat.names import FILES, HOMES

ROOT = Path(__file__).parents[2]


def path_of(module: str) -> Path:
    """Return the stub's file of a module, as ``nblaunch.utils``."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".pyi")


def stub_of(module: str) -> str:
    """Return the text of a module's stub."""
    homes: dict[str, list[str]] = {}
    for name, home in HOMES[module].items():
        homes.setdefault(home, []).append(name)
    lines = ["# Written by `make stubs` from nblaunch/compat/names.py."]
    for home, names in sorted(homes.items()):
        lines.append(f"from {home} import (")
        lines += [f"    {name} as {name}," for name in sorted(names)]
        lines.append(")")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all stubs."""
    for module in FILES:
        path_of(module).write_text(stub_of(module), encoding="utf-8")


if __name__ == "__main__":
    main()
