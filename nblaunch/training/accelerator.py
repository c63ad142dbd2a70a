"""The :class:`Accelerator`, the interface for training functions.

It is a façade: the constructor resolves its arguments and builds the parts, and every method delegates to a part. It
never asks which device or strategy is in use. ``nblaunch/training/__init__.py`` lists the parts. Its base classes:

    process_methods.py   ranks, barriers, work that only some ranks do; also the base of ``PartialState``
    properties.py        settings and labels; parts such as ``self._preparer``
    per_process.py       rebuilds, in each worker, the parts of an Accelerator from a notebook cell, on first use
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from nblaunch.training import arguments, gradients, joining, uneven_inputs
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.checkpoints import load_state, model_files
from nblaunch.training.checkpoints.files import PROFILE_PATTERN_NAME, make_folder
from nblaunch.training.checkpoints.save_state import Saver
from nblaunch.training.checkpoints.snapshot import CheckpointedObjects, add_hook
from nblaunch.training.collectives import metrics
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.resuming import skip_first_batches
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.models import is_dispatched, plain_module
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DynamoBackend,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    project_of,
)
from nblaunch.training.parallelism import ParallelismConfig, context_parallel
from nblaunch.training.precision import Precision
from nblaunch.training.prepare import Preparer, extract_model_from_parallel
from nblaunch.training.properties import AcceleratorProperties
from nblaunch.training.shared_state import SharedState, get_shared_state
from nblaunch.training.state import AcceleratorState, reset_message
from nblaunch.training.strategies import Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin
from nblaunch.training.tracking import TrackerHub

T = TypeVar("T")


class Accelerator(AcceleratorProperties):
    """Prepares a plain PyTorch training loop for any number of processes, which then train as one.

    Example::

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean_loss = accelerator.reduce(loss.detach(), "mean").item()

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: a loader's ``batch_size`` counts the samples of all ranks together. None: as in
            ``dataloader_config``.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``. None: the precision of an earlier Accelerator,
            of ``notebook_launcher`` or from the variable ``ACCELERATE_MIXED_PRECISION``, in this order, or ``"no"``.
        gradient_accumulation_steps: number of micro-steps per optimizer step; see :meth:`accumulate`.
        cpu: compute on the CPU even if there are other devices.
        dataloader_config: how prepared loaders divide their data among ranks.
        rng_types: generators that are synchronised across ranks at the start of every epoch: ``"generator"`` (default;
            the loader's own, which is always synchronised if all ranks use its order), ``"torch"``, ``"cuda"``.
        log_with: trackers: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"jsonl"``, ``"all"``, a ``GeneralTracker``,
            or a list of these.
        project_dir: folder for this training run's checkpoints and logs.
        project_config: settings for this folder and for the names of checkpoints. Its ``project_dir``, if set, takes
            precedence.
        gradient_accumulation_plugin: all settings for accumulation, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: schedulers step only when their optimizer does, and then once per process,
            because schedules are written for a single process. False: they step exactly once per call.
        kwargs_handlers: at most one each of ``DistributedDataParallelKwargs``, ``GradScalerKwargs``,
            ``AutocastKwargs``, ``InitProcessGroupKwargs``, ``ProfileKwargs``, ``AORecipeKwargs``,
            ``TorchDynamoPlugin``.
        dynamo_backend: compile models with this backend of :func:`torch.compile`, such as ``"inductor"``. None: use the
            variable ``ACCELERATE_DYNAMO_BACKEND``; if it is not set, models are not compiled.
        dynamo_plugin: all settings for compilation, instead of ``dynamo_backend``.
        downcast_bf16: with bf16 on XLA devices, represent ``float`` as bf16 and ``double`` as fp32.
        strategy: ``"spmd"``: this process drives all XLA devices on the host, and the compiler shards batches over
            them. You can also pass your own ``StrategyPlugin``, which builds the strategy; see
            ``nblaunch.training.strategies``. None: the launcher's strategy, or else one device per process.
        fsdp_plugin: shard models over ranks, or with ``strategy="spmd"`` over the devices of this process. See
            ``FullyShardedDataParallelPlugin``.
        deepspeed_plugin: train with DeepSpeed's engine (ZeRO); see ``DeepSpeedPlugin``. None: use an earlier
            Accelerator's plugin, if there is one.
        deepspeed_plugins: several plugins by name; ``state.select_deepspeed_plugin(name)`` selects one for ``prepare``.
        parallelism_config: divide the ranks among data, sharded, tensor and context parallelism; see
            ``ParallelismConfig``. None: use an earlier Accelerator's configuration, if there is one.

    Raises:
        ValueError: an argument is invalid, contradicts another argument, or requests a device other than the one that
            an earlier Accelerator in this process uses.
        TypeError: an argument is unknown.
        NotImplementedError: an argument of Hugging Face Accelerate is not supported here yet.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        downcast_bf16: bool = False,
        strategy: StrategyPlugin | str | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        megatron_lm_plugin: None = None,
        torch_tp_plugin: None = None,
        **unsupported: Any,
    ) -> None:
        self._keep_arguments(locals())
        # 1. Check the arguments before changing anything.
        arguments.reject_unsupported(unsupported, megatron_lm_plugin, torch_tp_plugin)
        self._handlers = handlers = arguments.sort_handlers(kwargs_handlers or ())
        accumulation = arguments.resolve_accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin
        )
        data = arguments.resolve_data_config(split_batches, dataloader_config)
        generators = arguments.resolve_rng_types(rng_types)
        dynamo = arguments.resolve_dynamo(dynamo_backend, dynamo_plugin, handlers)
        project = project_of(project_dir, project_config)
        plugin = arguments.given_plugin(deepspeed_plugin, deepspeed_plugins, fsdp_plugin, strategy)
        # 2. Configure the device before joining the job, because joining uses the device.
        joining.configure_device(arguments.asks_for_spmd(strategy), downcast_bf16)
        self._shared = shared = get_shared_state(cpu, handlers.get(InitProcessGroupKwargs))
        # 3. Choose the settings that all Accelerators in the process share.
        chosen = self._choose_strategy(plugin, parallelism_config, mixed_precision, accumulation, data)
        self.state.dynamo_plugin = dynamo
        # 4. Create the parts that the methods delegate to.
        self._preparer = Preparer(
            shared,
            *chosen,  # precision, strategy, accumulation
            data,
            generators,
            device_placement,
            step_scheduler_with_optimizer,
            dynamo,
        )
        self._checkpoints = CheckpointedObjects(shared, self._preparer, project)
        self._saver = Saver(self._checkpoints)
        self._trackers = TrackerHub(log_with, project, shared.process)
        self.flag_tensor = None

    def _choose_strategy(
        self,
        passed: StrategyPlugin | None,
        parallelism_config: ParallelismConfig | None,
        mixed_precision: str | None,
        wanted_accumulation: GradientAccumulationPlugin,
        data: DataLoaderConfiguration,
    ) -> tuple[Precision, Strategy, AccumulationState]:
        """Choose the process's plugin, precision, accumulation and strategy; each choice may depend on earlier ones."""
        shared, backend = self._shared, self._shared.process.backend
        parallelism = arguments.resolve_parallelism(parallelism_config, shared.parallelism)
        plugin = passed or arguments.plugin_if_none_given(shared.plugin, self._handlers, parallelism_config)
        if parallelism is not None:
            plugin = arguments.parallel_plugin(plugin, parallelism, shared.process)
        name = plugin.precision_name(mixed_precision, backend)
        requested = arguments.resolve_precision(name, shared.precision, backend, self._handlers)
        accumulation = AccumulationState(shared.loaders, plugin.accumulation_settings(wanted_accumulation))
        setup = TrainingSetup(shared.process, requested, accumulation, data.split_batches, parallelism)
        strategy = plugin.build(setup)
        precision = strategy.adapt_precision(requested)
        shared.adopt(plugin, strategy, setup, precision)
        return precision, strategy, accumulation

    def _call_constructor(self, arguments: Mapping[str, Any]) -> None:
        Accelerator.__init__(self, **arguments)

    @property
    def _process(self) -> JoinedProcess:
        return self._check_state().process

    def _check_state(self) -> SharedState:
        """Return the shared state. Raise AttributeError if it was reset after this Accelerator was created."""
        shared: SharedState = self._shared
        if shared.precision is None:
            raise AttributeError(reset_message(AcceleratorState))
        return shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # trainers that copy their settings must keep sharing the Accelerator of the process

    def __repr__(self) -> str:
        return f"Accelerator(\n{self.state!r})"

    # --- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this job.

        Args:
            *args: the objects, in any order. Other objects, and None, are returned unchanged.
            device_placement: for each object, whether it moves to the device; None: as in the Accelerator.

        Returns:
            The prepared object; for several arguments, a tuple of prepared objects in the same order. An object that
            is already prepared is returned unchanged.

        Raises:
            ValueError: ``device_placement`` and ``args`` differ in length, or a module was already prepared: pass the
                prepared model instead.
            RuntimeError: this is a worker, and the Accelerator has prepared objects in the notebook.

        Example::

            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        self._check_state()
        prepared = self._preparer.prepare(args, device_placement)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model. The module itself moves to the device; nothing is copied.

        Args:
            model: the user's own module.
            device_placement: whether it goes to the device; None: as in the Accelerator.
            evaluation_mode: True: the model is not trained, so the strategy does not change it.

        Raises:
            ValueError: the module was already prepared.
        """
        return self._preparer.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer, after its model. It steps when the accumulation window ends."""
        return self._preparer.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler, after its optimizer. It steps with the optimizer."""
        return self._preparer.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Prepare one data loader for this rank's shard of the data.

        Args:
            data_loader: the loader to prepare. From now on, read only the loader that this method returns.
            device_placement: whether batches go to the device; None: as in the Accelerator.
            slice_fn_for_dispatch: ``function(batch, rows, process_index=, num_processes=)`` that returns a rank's part
                of a batch that rank 0 has read for all ranks; None: the slice ``rows`` of every tensor.
        """
        return self._preparer.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int | None = None) -> DataLoader:
        """Return a loader that skips the first batches of its next epoch, for use after :meth:`load_state`.

        Args:
            dataloader: the loader, prepared or not.
            num_batches: number of this rank's batches to skip; None: all batches before the position in the checkpoint
                that was loaded last, whatever the number of ranks.
        """
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's module inside a prepared model.

        Args:
            model: the model that ``prepare`` returned.
            keep_fp32_wrapper: False: also restore the module's original ``forward``, without mixed precision.
            keep_torch_compile: True: if the model is compiled, return a compiled module. False: return a module without
                compiled parts; if the model has any, this is a copy with plain names that shares all parameters.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shard sequences over ``cp_size`` ranks (if that is set) during the block, which runs one training step.

        Args:
            buffers: tensors with a sequence dimension: inputs, labels, positions. They are sharded in place.
            buffer_seq_dims: sequence dimension of each buffer.
            no_restore_buffers: buffers that may stay sharded after the block.
        """
        return context_parallel(self._shared.parallelism, buffers, buffer_seq_dims, no_restore_buffers)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map has split ``model``, as ``device_map="auto"`` does."""
        return is_dispatched(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and return unused memory to the device.

        Returns:
            One None per argument, to drop the caller's references: ``model, opt = accelerator.clear(model, opt)``.
        """
        self._preparer.clear()
        self.step = 0
        count = len(objects)
        del objects
        gc.collect()
        self._process.backend.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """Same as :meth:`free_memory`."""
        return self.free_memory(*objects)

    # --- gradients: one micro-step -----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients: ``loss.backward(**kwargs)``, with the loss divided by the number of micro-steps.

        With fp16, the loss is scaled as well. The dashboard reads the loss at most twice per second and at the end of
        an epoch, because it must wait for the device each time.

        Args:
            loss: a tensor with one element.
            **kwargs: arguments for :meth:`torch.Tensor.backward`, such as ``retain_graph=True``; or ``learning_rate``,
                for LOMO.

        Raises:
            RuntimeError: this is a worker, and the Accelerator has prepared objects in the notebook.
        """
        home = self._home  # avoid a call where possible, because this runs in every step
        parts = self._own_parts if home is not None and home.is_current else self._parts()
        gradients.backward(parts["_preparer"], loss, kwargs)

    def accumulate(self, *models: torch.nn.Module) -> gradients.MicroStep:
        """Run the block as one micro-step. Ranks average gradients, and optimizers step, only when the window ends.

        A window ends after ``gradient_accumulation_steps`` micro-steps, and at the last batch of a prepared loader.
        Models in separate calls, nested or consecutive, have separate windows, and so do their optimizers.

        Args:
            *models: models whose gradients are accumulated together in the block.

        Example::

            accelerator = Accelerator(gradient_accumulation_steps=4)
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(inputs), labels))
                    optimizer.step()  # does nothing in three out of four micro-steps
                    optimizer.zero_grad()
        """
        home = self._home  # as in backward
        parts = self._own_parts if home is not None and home.is_current else self._parts()
        return gradients.MicroStep(parts["_preparer"], models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Run the block without reducing gradients in ``backward``. Does nothing in a single process."""
        return self._preparer.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Reduce gradients in the next ``backward`` of the block, even if its forward passes ran under :meth:`no_sync`.

        Use it if one backward pass follows several forward passes. Does nothing for a model that no strategy prepared.
        """
        return gradients.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow unequal numbers of batches in the block. Ranks that run out of data join the steps of the others.

        As in Accelerate, ranks without data contribute zeros, and gradients are divided by the total number of ranks.
        With gradient accumulation, the end of an uneven loader does not close a window, so that all ranks synchronise
        in the same steps; the remaining gradients count towards the next window. At the end of the block, ranks that
        ran out of data get the state of optimizers, schedules and windows from the others. Ranks without data can't
        join other collectives, such as ``gather``, or a second forward pass of a model before the next batch.

        Args:
            joinables: the prepared models (and optimizers that communicate) in the loop.
            even_batches: inside the block, overrides the setting of all prepared loaders over indexed datasets.
        """
        return uneven_inputs.join_uneven_inputs(self._preparer, joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block in mixed precision, for computations outside a prepared model, such as a loss.

        ``autocast_handler`` has the settings; None: the ``AutocastKwargs`` in ``kwargs_handlers``, or the defaults.
        """
        return self._preparer.precision.autocast(autocast_handler)

    # --- gradients: unscaling and clipping ---------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the fp16 gradients of an optimizer or a list of optimizers; None means all prepared optimizers."""
        gradients.unscale(self._preparer, optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip unscaled gradients by their total norm; return the norm before clipping. Call it when gradients sync.

        At other times it clips the gradients that this rank has accumulated so far; with fp16, the next ``backward``
        then raises an error.

        Args:
            parameters: a parameter or an iterable of them.
            max_norm: largest norm that is not clipped.
            norm_type: p of the p-norm; ``float("inf")`` for the largest element.

        Example::

            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """
        return gradients.clip_grad_norm(self._preparer, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip unscaled gradients elementwise to [-clip_value, clip_value]. Call it when gradients sync.

        Args:
            parameters: a parameter or an iterable of them.
            clip_value: the largest absolute value of an element.
        """
        gradients.clip_grad_value(self._preparer, parameters, clip_value)

    # --- values of all ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Concatenate tensors across ranks along dim 0, in rank order, on every rank.

        Args:
            tensor: tensor or nested list, tuple or mapping of tensors, of equal shape on all ranks. A tensor without
                dimensions counts as one row.

        Raises:
            TypeError: a leaf is not a tensor.
            DistributedOperationException: shapes or types differ between ranks. All ranks raise it, and the message
                lists all ranks (over gloo, or with ``ACCELERATE_DEBUG_MODE``).
        """
        return self._operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of all ranks for a batch, with each sample of the dataset exactly once.

        Samples that were added to pad the last batch are dropped: rows of tensors and items of sequences.
        Values with one row per rank are kept. If sizes don't show which rows were added, it raises
        ValueError. All ranks must call it for each batch.

        Args:
            input_data: tensor, or nested structure of tensors and sequences of other objects (pickled).
            use_gather_object: always gather with pickle. A list of tensors then has one item per sample.

        Example::

            for inputs, labels in eval_loader:
                predictions, labels = accelerator.gather_for_metrics((model(inputs).argmax(dim=-1), labels))
                num_correct += (predictions == labels).sum()
        """
        window, num_ranks = self._preparer.accumulation, self._preparer.shared.num_data_ranks
        return metrics.gather_for_metrics(input_data, use_gather_object, window, num_ranks)

    def gather_object(self, items: Any) -> Any:
        """Return the elements of every rank's ``items``, in rank order, as one list. They are pickled.

        Args:
            items: an iterable on each rank, such as a list of strings. A single process gets it back unchanged.
        """
        return self._operations.gather_object(items)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Combine tensors from all ranks elementwise, without changing the argument.

        Args:
            tensor: tensor or nested structure of tensors, of equal shape on all ranks.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            scale: factor by which the result is multiplied.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: the reduction is unknown.
        """
        return self._operations.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite tensors in place with one rank's tensors, and return them.

        Args:
            tensor: tensor or nested structure of tensors, of equal shape on all ranks.
            from_process: the rank that sends.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: there is no rank ``from_process``.
        """
        return self._operations.broadcast(tensor, from_process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors to the largest size that any rank has in dimension ``dim``.

        Args:
            tensor: tensor or nested structure of tensors that may differ in size in ``dim`` from rank to rank.
            dim: the dimension; negative numbers count from the end. A tensor without it is returned unchanged.
            pad_index: value to pad with.
            pad_first: pad at the beginning instead of the end.

        Raises:
            TypeError: a leaf is not a tensor.
            DistributedOperationException: the type or the number of dimensions of a tensor differs between ranks. All
                ranks raise it, and the message lists all ranks (over gloo, or with ``ACCELERATE_DEBUG_MODE``).
        """
        return self._operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag that the next :meth:`check_trigger` reports to all ranks, for example to stop early."""
        self.flag_tensor = torch.ones(1, device=self._shared.process.device)

    def check_trigger(self) -> bool:
        """Return whether any rank has set the flag since the last check; clear it. A collective: call it on all ranks.

        Example::

            if loss.item() < 0.1:
                accelerator.set_trigger()
            if accelerator.check_trigger():  # the same answer on every rank
                break
        """
        mine = self.flag_tensor
        if mine is None:
            mine = torch.zeros(1, device=self._shared.process.device)
        is_set = bool(self._operations.reduce(mine, "sum") >= 1)
        if is_set:
            self.flag_tensor = None
        return is_set

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool = False,
        main_process_only: bool = False,
    ) -> str:
        """Save everything that is needed to continue training from exactly this point. Call it on all ranks.

        It saves weights, optimizers, schedulers, the gradient scaler, positions of loaders, registered objects and the
        random generators of every rank. The new checkpoint replaces the previous one in the folder only when
        it is complete and on disk. If saving fails or the process ends before that, the previous checkpoint remains
        intact. Other files are kept.

        Resumed training gives the same numbers as uninterrupted training. With three or more ranks, they are equal up
        to rounding, because DistributedDataParallel adds its first gradients in a different order.

        It is a collective without a deadline: the main process waits for every rank. If the other ranks enter another
        collective or exit, nblaunch concludes that only the main process is meant to save (``if is_main_process:``).
        The main process then saves without the random states of the other ranks, or raises an error if they hold shards
        of the weights.

        Args:
            output_dir: the folder on the main process; its path may begin with ``~``. Ignored with automatic naming;
                see ``ProjectConfiguration``.
            safe_serialization: write weights in the safetensors format; False: in torch's format.
            asynchronous: copy the state to CPU memory, return, and write in a thread. The next ``save_state`` or
                ``load_state``, :meth:`wait_for_checkpoint` or ``end_training`` raises the thread's errors. The memory
                is reused until ``end_training``. With an ``fsdp_plugin``, every rank does this with its shards; a
                strategy that does not support this writes its shards before the call returns. A worker exits only after
                the thread has finished.
            main_process_only: only the main process saves; it neither waits for other ranks nor saves their random
                states. Other ranks return immediately, and need not call it.

        Returns:
            The folder.

        Raises:
            ValueError: ``output_dir`` is missing or a file, an automatically named folder already exists, or
                ``main_process_only`` is set although every rank holds a shard of the weights.
            CheckpointError: the checkpoint could not be written; the message names the rank and the reason.
        """
        return self._saver.save(output_dir, safe_serialization, asynchronous, main_process_only)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last ``save_state(asynchronous=True)`` is on disk. Return immediately if none is in progress.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._saver.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **model_options: Any,
    ) -> None:
        """Load a checkpoint that :meth:`save_state` wrote. Call it on all ranks, after preparing the same objects.

        Before it changes anything, it checks that the checkpoint is complete and fits this job. Shards are checked only
        as they are loaded, and so are weights if there are hooks. To continue in the middle of an epoch, on any number
        of ranks, use ``accelerator.skip_first_batches(loader)``; loaders that know their position
        (``use_stateful_dataloader``) do so themselves.

        Args:
            input_dir: the folder, as in :meth:`save_state`. None: with automatic naming, the checkpoint with the
                highest number.
            load_kwargs: arguments of :func:`torch.load`, such as ``{"weights_only": False}``, which lets the files
                execute code. Even by default, states of registered objects may contain instances of the notebook's
                classes.
            **model_options: ``strict=False`` accepts weights whose names differ from the model's; ``map_location``,
                ``"cpu"`` (default) or ``"on_device"``, is the device onto which weights and optimizers are loaded.

        Raises:
            ValueError: the folder does not exist.
            CheckpointError: the checkpoint is damaged or does not fit this job; the message says what and where.
            TypeError: ``map_location`` or another option is unknown.
        """
        load_state.load_state(self._checkpoints, self._saver, input_dir, load_kwargs, **model_options)

    def register_for_checkpointing(self, *objects: Any, per_rank: bool | None = None) -> None:
        """Include objects in ``save_state`` and ``load_state``; a call in a cell also applies in workers.

        Args:
            *objects: objects with ``state_dict()``, which every rank calls, and ``load_state_dict(state)``. Sharded
                tensors are written in full.
            per_rank: True: each rank has its own state, so the number of ranks can't change. False: all ranks load the
                state of rank 0. None: each rank has its own state if the states differ, except for modules' buffers.

        Raises:
            ValueError: an object lacks one of these methods; none of the objects is registered.
        """
        self._checkpoints.register(objects, per_rank)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before ``save_state`` writes full weights.

        ``save_state`` writes shards before it calls the hook.

        Args:
            hook: gets the user's modules (without parallel wrappers or ``torch.compile``), their state dicts, and a
                folder to write to, which becomes the checkpoint when it is complete. ``save_state`` does not write
                state dicts that the hook removes from ``weights``.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` loads weights.

        Args:
            hook: receives the models, as a hook for saving does, and the folder. ``load_state`` does not load models
                that the hook removes from ``models``. If an ``fsdp_plugin`` or ``deepspeed_plugin`` saved shards, these
                are loaded first, and ``models`` is empty.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    # --- weights and single objects ----------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full weights of a prepared model.

        If ranks hold shards, all ranks must call it. The main process of every machine then gets the weights in CPU
        memory, and other ranks get an empty dict.

        Args:
            model: the model that :meth:`prepare` returned.
            unwrap: False: keep the names that wrappers give to the weights.
        """
        return self._checkpoints.strategy.state_dict(plain_module(model) if unwrap else model)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights in files that any tool can load. Call it on all ranks; the main process writes.

        Writes ``model.safetensors``, or shards ``model-00001-of-0000N.safetensors`` and their index. Old weights in the
        folder are removed when the new ones are complete; other files are kept. Other ranks don't wait for the files.

        Args:
            model: the model, prepared or not.
            save_directory: the folder, which exists on every rank when the call returns.
            max_shard_size: maximum size of the tensors in a file: a number of bytes, or a string such as ``"5GB"``.
            safe_serialization: use the safetensors format; False: torch's format, in ``pytorch_model.bin``.

        Raises:
            ValueError: ``save_directory`` is a file, or ``max_shard_size`` is not a valid size.
            RuntimeError: a parameter is on the meta device.
        """
        if self._checkpoints.is_writer or self._checkpoints.strategy.holds_shards:
            weights = self.get_state_dict(model)
            if self._checkpoints.is_writer:
                model_files.save_sharded(weights, Path(save_directory), max_shard_size, safe_serialization)
        make_folder(Path(save_directory))  # ranks may write other files to it

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save one object with ``torch.save`` on the main process; other ranks do nothing.

        A failure leaves the old file unchanged.

        Args:
            obj: the object to save.
            f: a path or an open binary file.
            safe_serialization: use the safetensors format, which requires a dict of tensors.

        Raises:
            CheckpointError: ``obj`` has sharded weights.
        """
        model_files.save_object(obj, f, safe_serialization, self._checkpoints.is_writer)

    # --- tracking ----------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers in ``log_with``. They run on the main process, unless their class requires all ranks.

        If trackers were started in a notebook cell, a worker starts them again, with the same arguments and as a new
        run, when it first uses them. A call in the launched function replaces the call in the cell.

        Args:
            project_name: name of the project to which the runs belong.
            config: settings to store with the run, such as learning rate and seed: a mapping, a dataclass, an argparse
                namespace, or an object with the settings as attributes. It is not changed.
            init_kwargs: further arguments by tracker name, such as ``{"wandb": {"tags": ["a"]}}``.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: Any = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values from the main process: to the trackers, the dashboard and ``job.metrics``.

        It also works without trackers. The dashboard and ``job.metrics`` receive numbers and short strings as Python
        types: an enum member becomes its value, and a NumPy number or a tensor with one element becomes a number. Other
        objects reach only trackers that support them. To log a tensor, this method waits for the tensor's device.

        Args:
            values: the values, by name; nested mappings get names such as ``loss/train``.
            step: the step that the values belong to; None: no step. If it is not a number, charts count calls instead,
                and ``job.metrics`` contains it as text.
            log_kwargs: further arguments by tracker name.

        Example::

            accelerator.log({"loss": loss.item(), "lr": scheduler.get_last_lr()[0]}, step=step)
        """
        self._shared.watch.before_show(values)
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called ``name``. On ranks where it does not run, return one that does nothing.

        Args:
            name: as in ``log_with``.
            unwrap: return the library's run object instead.

        Raises:
            ValueError: the tracker is unknown, or was not started.
        """
        return self._trackers.get(name, unwrap)

    # --- progress, profiling, and the end of training ----------------------------------------------------------------

    def progress(
        self, iterable: Iterable[T], total: int | None = None, desc: str | None = None
    ) -> Iterator[T]:
        """Iterate over ``iterable`` and show its steps on the dashboard. Prepared loaders are always shown.

        Args:
            iterable: any iterable; for a prepared loader, this method adds nothing.
            total: length of the iterable, if it has no ``len``.
            desc: short description, shown as this rank's status line. If it contains "epoch", the items count as
                epochs, and the dashboard shows them in its epochs column instead, for example as "2/6".

        Example::

            for text in accelerator.progress(texts, desc="tokenizing"):
                tokens.append(tokenize(text))
        """
        if isinstance(iterable, PreparedLoader):
            return iter(iterable)
        return self._shared.show_progress(iterable, total, desc)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Run the block under torch's profiler on every rank. This is a collective if traces are written.

        Args:
            profile_handler: settings for the profile, and the folder for traces, if any; None: the ``ProfileKwargs`` in
                ``kwargs_handlers``, or the defaults.

        Example::

            with accelerator.profile() as profiler:
                train_one_epoch()
            print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        """
        options = profile_handler or self.profile_handler or ProfileKwargs()
        with options.build() as profiler:
            yield profiler
        if options.output_trace_dir is not None:
            folder = Path(options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=self.process_index)
            profiler.export_chrome_trace(str(folder / name))
            self.wait_for_everyone()  # all traces exist when the block has ended

    def end_training(self) -> None:
        """Wait for the last checkpoint, end trackers and leave the process group. Call it last, on all ranks.

        Raises CheckpointError if the checkpoint could not be written.
        """
        try:
            self._saver.close()
        finally:
            self._trackers.finish()
            self.destroy_process_group()
