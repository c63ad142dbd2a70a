"""``nblaunch launch --print_plan``: every setting, where it came from, and what would be done on this machine."""

from __future__ import annotations

from nblaunch import in_words
from nblaunch.cli.supervised import plan_of, spec_of_script
from nblaunch.config.resolving import DEFAULT, Resolved
from nblaunch.config.settings import SETTINGS


def print_plan(resolved: Resolved, script: str | None) -> int:
    """Show the plan; starts nothing.

    Raises:
        UsageError: the settings do not make a launch on any machine.
    """
    spec = spec_of_script(resolved, script or "script.py", (), is_module=False)
    rows = [
        (name, _text(resolved[name]), resolved.sources[name])
        for name in SETTINGS
        if resolved.sources[name] != DEFAULT or resolved[name] not in (None, False)
    ]
    print("\n".join(_columns([("setting", "value", "from"), *rows])))
    if spec.accelerator:
        print("\nAccelerator() in the script takes, where it is not told otherwise:")
        print("\n".join(_columns([(f"  {name}", _text(value), "") for name, value in spec.defaults.items()])))
    print()
    plan = plan_of(spec)
    if isinstance(plan, str):
        print(f"on this machine: not possible: {plan}")
    else:
        machines = f" of {resolved['num_machines']} machines" if resolved["num_machines"] != 1 else ""
        print(
            f"on this machine{machines}: "
            f"{in_words.count(plan.num_processes, f'{plan.backend.name} process')} of "
            f"{in_words.count(plan.num_threads, 'CPU thread')}, started by {plan.start_method}"
        )
        for text in filter(None, (plan.detour, *plan.warnings)):
            print(f"note: {text}")
    for note in resolved.notes:
        print(f"note: {note}")
    return 0


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
