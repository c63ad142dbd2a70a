"""Counts of epochs and steps from transformers, Lightning and fastai, and signs of progress from any other code.

The loops of frameworks are observed like the loops of any library (``plain_loops.py``). The number of epochs comes not
from the user's code but from one of the framework's objects, which a hook queries at the beginning of each epoch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from time import monotonic
from typing import Any

from nblaunch import packages
from nblaunch.progress.plain_loops import harmless, plain_loops
from nblaunch.progress.planned_epochs import EpochPlan
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter


def watch(rank: int) -> None:
    """Set the hooks in this worker; only rank 0 shows transformers' table for notebooks."""
    packages.observe_when_imported("transformers.trainer_callback", _watch_trainer)
    if rank:
        packages.observe_when_imported("transformers.utils.notebook", _hide_table)
    for name in ("pytorch_lightning", "lightning.pytorch"):
        packages.observe_when_imported(f"{name}.trainer.trainer", _watch_lightning)
    packages.observe_when_imported("fastai.learner", _watch_fastai)


def _set_plan(plan: EpochPlan | None, steps: tuple[int, int] = (0, 0)) -> None:
    plain_loops().reports.loops.set_plan(plan, steps)


# --- transformers ----------------------------------------------------------------------------------------------------


def _watch_trainer(module: Any) -> None:
    call = module.CallbackHandler.call_event

    @harmless
    def report(event: str, state: Any) -> None:
        if event in ("on_train_begin", "on_epoch_begin", "on_step_end"):
            # The losses of an optimizer step are parts of one loss, divided by the number of micro-steps or tokens.
            plain_loops().sums_losses = True
            epoch = int(state.epoch or 0) + (event != "on_step_end" or state.epoch % 1 > 0)
            plan = EpochPlan(max(epoch, 1), math.ceil(state.num_train_epochs))
            _set_plan(plan, (state.global_step, max(state.max_steps, 0)))
        elif event == "on_train_end":
            plain_loops().sums_losses = False
            _set_plan(None)

    @packages.replaces(module.CallbackHandler, "call_event")
    def call_and_report(self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        report(event, state)
        return call(self, event, args, state, control, **kwargs)


def _hide_table(module: Any) -> None:
    """Hide the table, because rank 0 shows the same one."""

    def display(self: Any) -> None:
        """Do nothing."""

    module.NotebookProgressBar.display = module.NotebookTrainingTracker.display = display


# --- Lightning -------------------------------------------------------------------------------------------------------


def _watch_lightning(module: Any) -> None:
    fit = module.Trainer.fit
    reporting: list[Any] = []

    @packages.replaces(module.Trainer, "fit")
    def fit_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not reporting:
            reporting.append(_lightning_callback(module.Callback))
        if reporting[0] not in self.callbacks:
            self.callbacks.append(reporting[0])
        return fit(self, *args, **kwargs)


def _lightning_callback(base: type[Any]) -> Any:
    class ReportsEpochs(base):
        """Reports to nblaunch's dashboards how many epochs and steps there will be."""

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self._plan(trainer)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.max_steps > 0:
                self._plan(trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            _set_plan(None)

        @harmless
        def _plan(self, trainer: Any) -> None:
            num_epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else 0
            steps = (trainer.global_step, trainer.max_steps) if trainer.max_steps > 0 else (0, 0)
            length = trainer.num_training_batches
            length = length if isinstance(length, int) else -1
            _set_plan(EpochPlan(trainer.current_epoch + 1, num_epochs, length), steps)

    return ReportsEpochs()


# --- fastai ----------------------------------------------------------------------------------------------------------


def _watch_fastai(module: Any) -> None:
    call = module.Learner.__call__

    @harmless
    def report(learner: Any, event_name: Any) -> None:
        if event_name == "before_batch" and learner.training and learner.iter == 0:
            _set_plan(EpochPlan(learner.epoch + 1, learner.n_epoch, learner.n_iter))
        elif event_name == "after_step":
            plain_loops().count_step()  # fastai has its own optimizers
        elif event_name == "after_fit":
            _set_plan(None)

    @packages.replaces(module.Learner, "__call__")
    def call_and_report(self: Any, event_name: Any) -> Any:
        report(self, event_name)
        return call(self, event_name)


# --- signs of progress from other code --------------------------------------------------------------------------------

# Hooks count updates of tqdm's bars and parameters of new modules in the rank's slot of the board. The counts
# distinguish a working rank from a hung one, and show which ranks built a model instead of receiving it. Longer garbage
# collections are spans on the board.

_SHORTEST_COLLECTION_S = 1e-3
"""Shortest garbage collection that is recorded; most take microseconds."""


def count_progress(slot: Slot) -> None:
    """Count progress on ``slot`` from now on, even in libraries that are imported later."""
    packages.observe_when_imported("torch.nn.modules.module", lambda module: _watch_parameters(module, slot))
    packages.observe_when_imported("tqdm.std", lambda module: _watch_bars(module, slot))
    if slot.spans is not None:
        gc.callbacks.append(_recorder_of_collections(slot.spans))


def _watch_parameters(module: Any, slot: Slot) -> None:
    import torch

    def count(owner: Any, name: str, parameter: Any) -> None:
        # Parameters of lazy layers have no size yet.
        if parameter is not None and not torch.nn.parameter.is_lazy(parameter) and not parameter.is_meta:
            slot.built_bytes += parameter.numel() * parameter.element_size()

    module.register_module_parameter_registration_hook(count)


def _watch_bars(module: Any, slot: Slot) -> None:
    """Count updates of bars, at most ten per second while the function iterates over a bar."""
    update = module.tqdm.update

    @packages.replaces(module.tqdm, "update")
    def update_and_note(self: Any, n: float | None = 1) -> Any:
        if n:
            slot.note_progress()
        return update(self, n)


def _recorder_of_collections(spans: SpanWriter) -> Callable[[str, dict[str, int]], None]:
    """Return the callback that Python calls before and after a garbage collection."""
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        now_s = monotonic()
        if phase == "start":
            began_s = now_s
        elif now_s - began_s >= _SHORTEST_COLLECTION_S:
            spans.put(SpanKind.GARBAGE, began_s, now_s)

    return note
