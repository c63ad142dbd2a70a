"""Signs of progress of code that does not use nblaunch: steps of optimizers, bars of tqdm, parameters of new modules.

They are counted in the rank's slot of the board. By them the launcher distinguishes a rank that works from one that
hangs, and knows which ranks have built a model instead of receiving it.
"""

from __future__ import annotations

from typing import Any

from nblaunch import packages
from nblaunch.wire.board import Slot


def watch(slot: Slot) -> None:
    """Count on ``slot`` from now on, also what libraries do that are imported later."""
    packages.when_imported("torch.optim.optimizer", lambda module: _watch_optimizers(module, slot))
    packages.when_imported("torch.nn.modules.module", lambda module: _watch_parameters(module, slot))
    packages.when_imported("tqdm.std", lambda module: _watch_bars(module, slot))


def _watch_optimizers(module: Any, slot: Slot) -> None:
    import torch

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # a step that is compiled must not come upon foreign memory
            slot.count_update()

    module.register_optimizer_step_post_hook(count)


def _watch_parameters(module: Any, slot: Slot) -> None:
    def count(owner: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            slot.add_built_bytes(parameter.numel() * parameter.element_size())

    module.register_module_parameter_registration_hook(count)


def _watch_bars(module: Any, slot: Slot) -> None:
    """Count updates of bars, at most ten a second while a bar is iterated over."""
    update = module.tqdm.update

    def update_and_note(self: Any, n: float | None = 1) -> Any:
        if n:
            slot.note_progress()
        return update(self, n)

    module.tqdm.update = update_and_note
