"""A ``Trainer`` or ``TrainingArguments`` of transformers that was made in a notebook cell takes its place in a worker.

Both keep what they found out about their process: device, number of GPUs, batch size per process, an Accelerator.
Here these attributes are found out anew when one of them is first used on an object that another process made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from nblaunch import packages

_MARK = "_nblaunch_worker"
"""Attribute with the name of the process that found out the others: plain text, since arguments are saved to files."""


_OF_ARGUMENTS = ("_setup_devices", "_n_gpu", "distributed_state")
_OF_TRAINERS = (
    "accelerator",
    "gather_function",
    "_train_batch_size",
    "is_fsdp_enabled",
    "is_deepspeed_enabled",
)


def let_them_join() -> None:
    """Have the two classes look at this worker, as soon as they are imported."""
    worker = os.urandom(8).hex()
    packages.when_imported("transformers.training_args", lambda module: _watch_arguments(module, worker))
    packages.when_imported("transformers.trainer", lambda module: _watch_trainers(module, worker))


def _watch_arguments(module: Any, worker: str) -> None:
    cls = module.TrainingArguments
    find_out = getattr(cls._setup_devices, "func", None) or cls._setup_devices.fget

    def renew(arguments: Any) -> None:
        vars(arguments)["_setup_devices"] = find_out(arguments)

    for name in _OF_ARGUMENTS:
        setattr(cls, name, _Renewed(name, worker, renew, ()))


def _watch_trainers(module: Any, worker: str) -> None:
    def renew(trainer: Any) -> None:
        _ = trainer.args.device  # joins the process group by the arguments' own settings
        trainer._train_batch_size = trainer.args.train_batch_size
        trainer.create_accelerator_and_postprocess()

    for name in _OF_TRAINERS:
        setattr(module.Trainer, name, _Renewed(name, worker, renew, _OF_TRAINERS))


class _Renewed:
    """An attribute that is found out anew, with others, on an object that this worker did not make.

    Args:
        name: of the attribute.
        worker: name of this process.
        renew: finds out all attributes of an object that are marked together.
        evidence: attributes of which an object that was made elsewhere has one; empty: an object without any is treated
            in the same way, as its own class finds them out when they are first used.
    """

    def __init__(self, name: str, worker: str, renew: Callable[[Any], None], evidence: Sequence[str]) -> None:
        self._name = name
        self._worker = worker
        self._renew = renew
        self._evidence = evidence

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        values = vars(instance)
        self._update(instance, values)
        try:
            return values[self._name]
        except KeyError:
            raise AttributeError(
                f"{type(instance).__name__!r} object has no attribute {self._name!r}"
            ) from None

    def __set__(self, instance: Any, value: Any) -> None:
        self._update(instance, vars(instance))
        vars(instance)[self._name] = value

    def _update(self, instance: Any, values: dict[str, Any]) -> None:
        if values.get(_MARK) == self._worker:
            return
        values[_MARK] = self._worker
        if not self._evidence or not values.keys().isdisjoint(self._evidence):
            self._renew(instance)
