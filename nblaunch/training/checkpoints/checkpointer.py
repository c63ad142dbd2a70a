"""What an ``Accelerator`` offers for saving and loading: :class:`Checkpointing`, done by its :class:`Checkpointer`.

The folder of a
checkpoint, with the names that users of the reference know:

    model.safetensors (or pytorch_model.bin), optimizer.bin, scheduler.bin, sampler.bin, scaler.pt,
    random_states_<rank>.pkl, custom_checkpoint_<i>.pkl; the second of a kind has _1 in its name;
    nblaunch_checkpoint.json lists them all

Where ranks hold parts of models, weights and optimizers lie in folders instead, a file of each rank in them:
pytorch_model_fsdp_0/ and optimizer_0/ for FSDP2.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch.training.checkpoints import model_files
from nblaunch.training.checkpoints.restoring import Restorer
from nblaunch.training.checkpoints.saving import Saver
from nblaunch.training.checkpoints.snapshot import TrainingState, add_hook
from nblaunch.training.models import bare_module
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.prepare import Preparer
from nblaunch.training.session import Session


class Checkpointer:
    """Saves and loads the state of one process's share of a job.

    Args:
        session: its session.
        preparer: has the prepared objects.
        project: says where and how many.
    """

    def __init__(self, session: Session, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.state = TrainingState(session, preparer, project)
        self.saver = Saver(self.state)
        self.restorer = Restorer(self.state, self.saver.wait)


class Checkpointing(ABC):
    """Saving and loading. The final class gives it its ``_checkpointer``."""

    @property
    @abstractmethod
    def _checkpointer(self) -> Checkpointer:
        """What does the work."""

    # --- where ---------------------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go."""
        return self._checkpointer.state.project

    @property
    def project_dir(self) -> str | None:
        """The folder of this training run; None: none was given."""
        return self._checkpointer.state.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for trackers that write files; None: none was given."""
        return self._checkpointer.state.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self._checkpointer.state.project.iteration

    # --- the whole state -----------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool = False,
        main_process_only: bool = False,
    ) -> str:
        """Save everything that training needs to continue exactly: call it on all ranks.

        Weights, optimizers, schedulers, the gradient scaler, where loaders are, registered objects and the random
        generators of every rank. What the folder held before is replaced only when the new checkpoint is complete and
        forced to disk: a failure, or the end of the process at any moment, leaves the old one. Other files stay.

        A collective without a deadline: the main process waits for every rank, however late. Ranks that go on to
        another collective, or end, show that the main process was meant to save alone (``if is_main_process:``); it
        does, without their random states. Where they hold parts of the weights, that is an error.

        Args:
            output_dir: the folder, as the main process names it. Ignored with automatic naming, see
                ``ProjectConfiguration``.
            safe_serialization: weights in safetensors' format; False: torch's.
            asynchronous: copy the state to CPU memory, return, and write in a thread. What goes wrong is raised by the
                next ``save_state`` or ``load_state``, by :meth:`wait_for_checkpoint` and by ``end_training``. The
                memory is kept for the next time, until ``end_training``. Parts that ranks hold of weights and
                optimizers are written before it returns.
            main_process_only: the main process saves, without the random states of other ranks, and waits for none; the
                others return at once. They need not call it.

        Returns:
            The folder.

        Raises:
            ValueError: no folder was given, it is a file, or the automatically named one exists; or
                ``main_process_only`` where every rank holds a part of the weights.
            CheckpointError: it could not be written; names the rank and the reason.
        """
        return self._checkpointer.saver.save(output_dir, safe_serialization, asynchronous, main_process_only)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last ``save_state(asynchronous=True)`` is on disk. Returns at once where nothing is under way.

        Raises:
            CheckpointError: it could not be written.
        """
        self._checkpointer.saver.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        any_world_size: bool = False,
        **model_options: Any,
    ) -> None:
        """Load what :meth:`save_state` saved: call it on all ranks, after ``prepare`` of the same objects.

        Whether the checkpoint is whole and fits is looked at before anything is changed. After one that was taken in
        the middle of an epoch, continue with ``accelerator.skip_first_batches(loader, batches_seen)``.

        Args:
            input_dir: the folder. None: with automatic naming, the one with the highest number.
            load_kwargs: for :func:`torch.load`, as ``{"weights_only": False}``, which lets the files execute code.
            any_world_size: also take a checkpoint of another number of processes. Its random states and the order of
                its data don't carry over then.
            **model_options: ``strict=False`` accepts other names of weights than the models have; ``map_location``:
                ``"cpu"`` (default) or ``"on_device"``, where files are read to.

        Raises:
            ValueError: there is no such folder.
            CheckpointError: the checkpoint is damaged, or does not fit this job; says what and where.
            TypeError: an unknown ``map_location`` or option.
        """
        self._checkpointer.restorer.load(input_dir, load_kwargs, any_world_size, **model_options)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have ``save_state`` and ``load_state`` include these objects.

        Args:
            *objects: have ``state_dict()`` and ``load_state_dict(state)``.

        Raises:
            ValueError: some have not; lists them. None is registered then.
        """
        unfit = [
            f"argument {position} ({type(obj).__name__})"
            for position, obj in enumerate(objects)
            if not (
                callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
            )
        ]
        if unfit:
            raise ValueError(
                f"objects to register need state_dict and load_state_dict; not so {', '.join(unfit)}"
            )
        self._checkpointer.state.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before ``save_state`` writes.

        Args:
            hook: gets the prepared models, their state dicts, and the folder to write to, which takes its place when
                the checkpoint is complete. State dicts that it takes out of ``weights`` are not written.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        return add_hook(self._checkpointer.state.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` loads weights.

        Args:
            hook: gets the prepared models and the folder. Models that it takes out of ``models`` are not loaded.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        return add_hook(self._checkpointer.state.load_hooks, hook)

    # --- weights and single objects ------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights of a prepared model. ``unwrap=False``: with the names that its wrappers give them.

        Where every rank holds a part of them, all ranks must call it; the main process of every machine gets them, in
        CPU memory, the others an empty dict.
        """
        module = bare_module(model) if unwrap else model
        return dict(self._checkpointer.state.strategy.state_dict(module))

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights, to be read without nblaunch. Call it on all ranks; the main process writes.

        Writes ``model.safetensors``, or shards ``model-00001-of-0000N.safetensors`` and their index. Weights that the
        folder held before go when the new ones are complete; other files stay.

        Args:
            model: prepared or not.
            save_directory: made where it does not exist.
            max_shard_size: bytes of tensors per file, as a number or as in ``"5GB"``.
            safe_serialization: safetensors' format; False: torch's, in ``pytorch_model.bin``.

        Raises:
            ValueError: ``save_directory`` is a file, or ``max_shard_size`` is not a size.
            RuntimeError: a parameter is on the meta device.
        """
        if not self._writes and not self._checkpointer.state.strategy.holds_parts:
            return
        weights = self.get_state_dict(model)
        if self._writes:
            model_files.save_sharded(weights, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """``torch.save`` on the main process; the others do nothing. A failure leaves the file as it was.

        Args:
            obj: what to save.
            f: a path, or a binary file that is open.
            safe_serialization: safetensors' format, for a dict of tensors.

        Raises:
            CheckpointError: ``obj`` has weights of which this rank holds but a part.
        """
        model_files.refuse_parts(obj)
        if self._writes:
            model_files.write_object(obj, f, safe_serialization)

    @property
    def _writes(self) -> bool:
        topology = self._checkpointer.state.session.member.topology
        on_each = self._checkpointer.state.project.save_on_each_node
        return topology.local_rank == 0 if on_each else topology.rank == 0
