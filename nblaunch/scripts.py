"""``nblaunch.launch``: a training function from a Python script, with the settings of a configuration file.

import nblaunch

def train(model): ...

if __name__ == "__main__":
    result = nblaunch.launch(train, (model,), num_processes=4)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nblaunch import env
from nblaunch.config.launching import device_choice, resolved_settings, spec_of
from nblaunch.config.resolving import unknown
from nblaunch.config.settings import SETTINGS
from nblaunch.running import run


def launch(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    config_file: str | os.PathLike[str] | None = None,
    return_all: bool = False,
    sync_weights: bool = True,
    background: bool = False,
    **settings: Any,
) -> Any:
    """Run ``function(*args)`` on every device, one process each, and return rank 0's value.

    The same as :func:`nblaunch.notebook_launcher`, with the settings and the configuration file of ``nblaunch launch``:
    an argument beats the file, the file beats the defaults.

    Args:
        function: the training function. It runs in every worker; its return value must be picklable.
        args: its positional arguments, a tuple; a model among them is held in memory once.
        config_file: written by ``nblaunch config`` or ``accelerate config``; None = the default one, if it exists.
        return_all: return the list of all ranks' values.
        sync_weights: load the trained weights of the modules in ``args`` back into these very modules.
        background: return a :class:`Job` at once; its ``result()`` waits.
        **settings: any option of ``nblaunch launch`` by its name, as ``num_processes=4, mixed_precision="bf16"``.

    Returns:
        The return value of rank 0; the list of all ranks' with ``return_all``; a :class:`Job` with ``background``.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting, or the file, has a value that it can't have; raised before any process starts.
        LaunchError: the workers could not be started.
        BaseException: whatever ``function`` raised first, with its original type.
    """
    __tracebackhide__ = True
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(f"launch() got an unexpected argument: {unknown(name, SETTINGS)}")
    resolved = resolved_settings(config_file, settings)
    spec = spec_of(resolved, function, args, return_all=return_all, sync_weights=sync_weights)
    shown = "auto" if resolved["dashboard"] == "text" else resolved["dashboard"]
    with env.patched(device_choice(resolved)):
        return run(spec, background=background, dashboard=shown)
