"""Counts of epochs and steps from transformers, Lightning and fastai.

The loops of frameworks are observed like the loops of any library (``plain_loops.py``). The number of epochs comes not
from the user's code but from one of the framework's objects, which a hook queries at the beginning of each epoch.
"""

from __future__ import annotations

import math
from typing import Any

from nblaunch import packages
from nblaunch.progress.plain_loops import harmless, plain_loops
from nblaunch.progress.planned_epochs import EpochPlan


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
