"""The :class:`Accelerator`: what a user's training function calls.

A façade: the constructor resolves its arguments and builds the parts, to which every method delegates; it never asks
which device or strategy is in use. ``nblaunch/training/__init__.py`` lists the parts. Inherited are

    process_methods.py   ranks, barriers, only some ranks: what ``PartialState`` has, too
    properties.py        settings and labels to read; its parts, as ``self._preparer``
    per_process.py       the constructor makes these parts; an Accelerator of a notebook cell gets others in each
                         worker, when they are first used there
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
from nblaunch.training.checkpoints.files import PROFILE_PATTERN_NAME
from nblaunch.training.checkpoints.safe_save import make_folder
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
from nblaunch.training.tracking.hub import TrackerHub

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
        split_batches: a loader's ``batch_size`` is that of all ranks together. None: as ``dataloader_config`` says.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``. None: that of the Accelerator before; at first,
            what ``notebook_launcher`` was given, else the variable ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        gradient_accumulation_steps: micro-steps per optimizer step, see :meth:`accumulate`.
        cpu: compute on the CPU even where there are other devices.
        dataloader_config: how prepared loaders share their data among ranks.
        rng_types: generators that are made equal over ranks at the start of every epoch: ``"generator"`` (the loader's
            own, the default; where ranks share the order that it draws, it always is), ``"torch"``, ``"cuda"``.
        log_with: trackers: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"jsonl"``, ``"all"``, a ``GeneralTracker``,
            or a list of these.
        project_dir: folder of this training run, for checkpoints and logs.
        project_config: the same in full, and how checkpoints are named. Its own ``project_dir``, if any, is the one.
        gradient_accumulation_plugin: gradient accumulation in full, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: schedulers step where their optimizer does, and once per process, because
            schedules are written for a single one. False: exactly once per call.
        kwargs_handlers: at most one each of ``DistributedDataParallelKwargs``, ``GradScalerKwargs``,
            ``AutocastKwargs``, ``InitProcessGroupKwargs``, ``ProfileKwargs``, ``AORecipeKwargs``,
            ``TorchDynamoPlugin``.
        dynamo_backend: compile models with this backend of :func:`torch.compile`, as ``"inductor"``. None: the variable
            ``ACCELERATE_DYNAMO_BACKEND``, else models are not compiled.
        dynamo_plugin: compilation in full, instead of ``dynamo_backend``.
        downcast_bf16: with bf16 on XLA devices, represent ``float`` as bf16 and ``double`` as fp32.
        strategy: ``"spmd"``: this process drives all XLA devices of the host, and the compiler cuts batches over them.
            None: as in ``notebook_launcher``, else one device per process. Or a ``StrategyPlugin`` of your own, which
            builds the strategy; see ``nblaunch.training.strategies``.
        fsdp_plugin: shard models over ranks, for those that don't fit one device; with ``strategy="spmd"``, over the
            devices of this process. See its class.
        deepspeed_plugin: train with DeepSpeed's engine (ZeRO); see its class. Where None is given, a later Accelerator
            goes on with the plugins of the first.
        deepspeed_plugins: several of them by name; ``state.select_deepspeed_plugin(name)`` says which ``prepare`` uses.
        parallelism_config: divide the ranks among data, sharded, tensor and context parallelism; see its class. Where
            None is given, a later Accelerator goes on with that of the first.

    Raises:
        ValueError: an argument has an invalid value, contradicts another one, or asks for another device than an
            earlier Accelerator of this process.
        TypeError: an unknown argument.
        NotImplementedError: an argument of Hugging Face Accelerate that is not supported here yet.
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
        # 1. The arguments alone: what is wrong with them is reported before anything is changed.
        arguments.refuse_unsupported(unsupported, megatron_lm_plugin, torch_tp_plugin)
        self._handlers = handlers = arguments.sort_handlers(kwargs_handlers or ())
        accumulation = arguments.resolve_accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin
        )
        data = arguments.resolve_data_config(split_batches, dataloader_config)
        generators = arguments.resolve_rng_types(rng_types)
        dynamo = arguments.resolve_dynamo(dynamo_backend, dynamo_plugin, handlers)
        project = project_of(project_dir, project_config)
        plugin = arguments.given_plugin(deepspeed_plugin, deepspeed_plugins, fsdp_plugin, strategy)
        # 2. The process: its device is configured before the device is first used, which joining the job does.
        joining.configure_device(arguments.asks_for_spmd(strategy), downcast_bf16)
        self._shared = shared = get_shared_state(cpu, handlers.get(InitProcessGroupKwargs))
        # 3. What the Accelerators of one process agree on.
        chosen = self._choose_strategy(plugin, parallelism_config, mixed_precision, accumulation, data)
        self.state.dynamo_plugin = dynamo
        # 4. The parts that the methods delegate to.
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
        given: StrategyPlugin | None,
        parallelism_config: ParallelismConfig | None,
        mixed_precision: str | None,
        wanted_accumulation: GradientAccumulationPlugin,
        data: DataLoaderConfiguration,
    ) -> tuple[Precision, Strategy, AccumulationState]:
        """Choose the plugin, the precision, the accumulation and the strategy, and make them those of the process.

        In this order, since each depends on those before it.
        """
        shared, backend = self._shared, self._shared.process.backend
        parallelism = arguments.resolve_parallelism(parallelism_config, shared.parallelism)
        plugin = given or arguments.plugin_if_none_given(shared.plugin, self._handlers, parallelism_config)
        if parallelism is not None:
            plugin = arguments.parallel_plugin(plugin, parallelism, shared.process)
        name = plugin.precision_name(mixed_precision, backend)
        asked = arguments.resolve_precision(name, shared.precision, backend, self._handlers)
        accumulation = AccumulationState(shared.loaders, plugin.accumulation_settings(wanted_accumulation))
        setup = TrainingSetup(shared.process, asked, accumulation, data.split_batches, parallelism)
        strategy = plugin.build(setup)
        precision = strategy.adapt_precision(asked)
        shared.adopt(plugin, strategy, setup, precision)
        return precision, strategy, accumulation

    def _call_constructor(self, arguments: Mapping[str, Any]) -> None:
        Accelerator.__init__(self, **arguments)

    @property
    def _process(self) -> JoinedProcess:
        return self._check_state().process

    def _check_state(self) -> SharedState:
        """Return the shared state; AttributeError where it was reset since this Accelerator was made."""
        shared: SharedState = self._shared
        if shared.precision is None:
            raise AttributeError(reset_message(AcceleratorState))
        return shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # one per process: trainers that copy their settings go on sharing it

    def __repr__(self) -> str:
        return f"Accelerator(\n{self.state!r})"

    # --- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready for this job.

        Args:
            *args: the objects, in any order. Those of other kinds, and None, come back as they are.
            device_placement: for each of them, whether it goes to the device; None: as in the Accelerator.

        Returns:
            The prepared object, or several as a tuple in the order in which they were given. What was returned here
            before comes back as the very same object.

        Raises:
            ValueError: ``device_placement`` is not as long as ``args``; or a module was prepared before, and it is its
                prepared form that is to be passed.
            RuntimeError: this is a worker, and the Accelerator was made in the notebook and has prepared objects there.

        Example::

            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        self._check_state()
        prepared = self._preparer.prepare(args, device_placement)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model. It is moved in place.

        Args:
            model: the user's own module.
            device_placement: whether it goes to the device; None: as in the Accelerator.
            evaluation_mode: True: it is not trained, so the strategy leaves it alone.

        Raises:
            ValueError: its module was prepared before.
        """
        return self._preparer.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer, after its model: it steps where the accumulation window ends."""
        return self._preparer.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler, after its optimizer: it steps where that one does."""
        return self._preparer.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Prepare one data loader: this rank's part of it.

        Args:
            data_loader: it is not read any more.
            device_placement: whether batches go to the device; None: as in the Accelerator.
            slice_fn_for_dispatch: ``function(batch, rows, process_index=, num_processes=)`` that cuts a rank's part out
                of a batch that rank 0 read for all; None: the slice ``rows`` of every tensor.
        """
        return self._preparer.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int | None = None) -> DataLoader:
        """Return a loader that starts its next epoch behind the first batches, as after :meth:`load_state`.

        Args:
            dataloader: prepared or not.
            num_batches: how many are left out, of this rank; None: all that was seen, on however many ranks, when the
                checkpoint that was loaded last was saved in the middle of an epoch.
        """
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's own module inside a prepared model.

        Args:
            model: what ``prepare`` returned.
            keep_fp32_wrapper: False: also give the module its original ``forward`` back, without mixed precision.
            keep_torch_compile: True: the module of a compiled model comes back compiled. False: nothing of it is
                compiled, parts included; where parts are, it is a copy that shares all parameters, with plain names.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Run the block, a training step, with sequences sharded over the ranks of ``cp_size``; else it has no effect.

        Args:
            buffers: tensors that have a dimension of the sequence: inputs, labels, positions. Sharded in place.
            buffer_seq_dims: that dimension of each.
            no_restore_buffers: those of them that may stay sharded after the block.
        """
        return context_parallel(self._shared.parallelism, buffers, buffer_seq_dims, no_restore_buffers)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map has cut ``model`` into pieces, as ``device_map="auto"`` does."""
        return is_dispatched(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared and return unused memory to the device.

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
        """Do the same as :meth:`free_memory`."""
        return self.free_memory(*objects)

    # --- gradients: one micro-step -----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients: ``loss.backward(**kwargs)``, with the loss divided by the micro-steps of a window.

        With fp16, the loss is scaled as well. Its value is shown on the dashboard, at most twice a second and at the
        end of an epoch: reading it makes the process wait for the device.

        Args:
            loss: a tensor of one element.
            **kwargs: for :meth:`torch.Tensor.backward`, as ``retain_graph=True``; or ``learning_rate``, for LOMO.

        Raises:
            RuntimeError: this is a worker, and the Accelerator was made in the notebook and has prepared objects there.
        """
        gradients.backward(self._preparer, loss, **kwargs)

    def accumulate(self, *models: torch.nn.Module) -> gradients.MicroStep:
        """Run the block as one micro-step: ranks average gradients and optimizers step only where the window ends.

        A window ends after ``gradient_accumulation_steps`` micro-steps, and at the last batch of a prepared loader.
        Models of separate calls, nested or one after the other, have windows of their own, as have their optimizers.

        Args:
            *models: those whose gradients are accumulated together in the block.

        Example::

            accelerator = Accelerator(gradient_accumulation_steps=4)
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(inputs), labels))
                    optimizer.step()  # does nothing in three of four micro-steps
                    optimizer.zero_grad()
        """
        return gradients.MicroStep(self._preparer, models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Run the block with ``backward`` leaving gradients unreduced. Does nothing in a lone process."""
        return self._preparer.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Have the next ``backward`` in the block reduce gradients although its forwards ran under :meth:`no_sync`.

        For several forwards and one backward. Does nothing for a model that no strategy has prepared.
        """
        return gradients.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks have unequal numbers of batches in the block: those at their end take part in the others' steps.

        Gradients are divided by the number of all ranks, as in Accelerate: those at their end count as zeros. With
        gradient accumulation the end of a loader of which they have unequal numbers closes no window, so that all
        synchronise at the same steps; what is left accumulated counts in the next one. At the end of the block, ranks
        that were at their end early get the state of optimizers, schedules and windows of the others. Other collectives
        in the loop (``gather``) are not answered for, nor a second forward of a model before the next batch.

        Args:
            joinables: the prepared models (and optimizers that communicate) of the loop.
            even_batches: overrides the setting of all prepared loaders over indexed datasets inside the block.
        """
        return uneven_inputs.join_uneven_inputs(self._preparer, joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block in mixed precision: for computations outside of a prepared model, such as a loss.

        ``autocast_handler`` says how; None: the ``AutocastKwargs`` among ``kwargs_handlers``, or the defaults.
        """
        return self._preparer.precision.autocast(autocast_handler)

    # --- gradients: where they are -----------------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16 gradients to their true size: those of an optimizer or a list; None: of all prepared ones."""
        gradients.unscale(self._preparer, optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their total norm, in true size, and return the norm before. Call it where gradients sync.

        Elsewhere it clips what this rank has accumulated by then; with fp16 the next ``backward`` then raises.

        Args:
            parameters: a parameter or an iterable of them.
            max_norm: largest norm that is left as it is.
            norm_type: as the p of the norm; ``float("inf")`` for the largest element.

        Example::

            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """
        return gradients.clip_grad_norm(self._preparer, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value], in true size. Call it where gradients sync.

        Args:
            parameters: a parameter or an iterable of them.
            clip_value: the largest absolute value of an element.
        """
        gradients.clip_grad_value(self._preparer, parameters, clip_value)

    # --- values of all ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Concatenate tensors over ranks on dim 0, in rank order, on every rank.

        Args:
            tensor: tensor or nested list, tuple or mapping of tensors, of equal shape on all ranks. A tensor without
                dimensions counts as one row.

        Raises:
            TypeError: a leaf is not a tensor.
            DistributedOperationException: shapes or types differ from rank to rank; on every rank, naming all (on gloo,
                and everywhere with ``ACCELERATE_DEBUG_MODE``).
        """
        return self._operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what ranks computed for their batches, each sample of the dataset exactly once.

        Samples that completed the last batch are dropped: rows of tensors, items of sequences of objects; where sizes
        don't show them, that is a ValueError. What has one row per rank is kept. All ranks must call it for each batch.

        Args:
            input_data: tensor, or nested structure of tensors and sequences of other objects, which are pickled.
            use_gather_object: gather with pickle in any case: a list of tensors has one item per sample then.

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
            items: an iterable on each rank, as a list of strings. A lone process gets it back as it is.
        """
        return self._operations.gather_object(items)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Combine tensors over ranks, elementwise. The argument is not changed.

        Args:
            tensor: tensor or nested structure of tensors, of equal shape on all ranks.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            scale: the result is multiplied by it.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: the reduction is unknown.
        """
        return self._operations.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite tensors with those of one rank, in place, and return them.

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
            dim: the dimension, negative from the end; a tensor without it is returned as it is.
            pad_index: value to pad with.
            pad_first: pad in front instead of behind.

        Raises:
            TypeError: a leaf is not a tensor.
            DistributedOperationException: the type or the number of dimensions of a tensor differs from rank to rank;
                on every rank, naming all (on gloo, and everywhere with ``ACCELERATE_DEBUG_MODE``).
        """
        return self._operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag that the next :meth:`check_trigger` reports to all ranks, as for stopping early."""
        self.flag_tensor = torch.ones(1, device=self._shared.process.device)

    def check_trigger(self) -> bool:
        """Return whether any rank set the flag since the last check, and clear it. A collective: call it on all ranks.

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
        """Save everything that training needs to continue exactly: call it on all ranks.

        Weights, optimizers, schedulers, the gradient scaler, where loaders are, registered objects and the random
        generators of every rank. What the folder held before is replaced only when the new checkpoint is complete and
        forced to disk: a failure, or the end of the process at any moment, leaves the old one. Other files stay.

        Training that continues gives the same numbers, from three ranks on up to rounding: DistributedDataParallel adds
        its first gradients up in another order.

        A collective without a deadline: the main process waits for every rank, however late. Ranks that go on to
        another collective, or end, show that the main process was meant to save alone (``if is_main_process:``); it
        does, without their random states. Where they hold shards of the weights, that is an error.

        Args:
            output_dir: the folder, as the main process names it, which may begin with ``~``. Ignored with automatic
                naming, see ``ProjectConfiguration``.
            safe_serialization: weights in safetensors' format; False: torch's.
            asynchronous: copy the state to CPU memory, return, and write in a thread. What goes wrong is raised by the
                next ``save_state`` or ``load_state``, by :meth:`wait_for_checkpoint` and by ``end_training``. The
                memory is kept for the next time, until ``end_training``. So does every rank with its shards of an
                ``fsdp_plugin``; a strategy that can't writes its shards before it returns. A function that returns
                meanwhile is waited for.
            main_process_only: the main process saves, without the random states of other ranks, and waits for none; the
                others return at once. They need not call it.

        Returns:
            The folder.

        Raises:
            ValueError: no folder was given, it is a file, or the automatically named one exists; or
                ``main_process_only`` where every rank holds a shard of the weights.
            CheckpointError: it could not be written; names the rank and the reason.
        """
        return self._saver.save(output_dir, safe_serialization, asynchronous, main_process_only)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last ``save_state(asynchronous=True)`` is on disk. Returns at once where nothing is under way.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saver.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **model_options: Any,
    ) -> None:
        """Load what :meth:`save_state` saved: call it on all ranks, after ``prepare`` of the same objects.

        Whether the checkpoint is whole and fits is looked at before anything is changed; whether shards fit, and
        weights where there are hooks, only as they are loaded. After one that was taken in the middle of an epoch,
        continue with ``accelerator.skip_first_batches(loader)``, on any number of ranks; loaders that know their
        position (``use_stateful_dataloader``) do so by themselves.

        Args:
            input_dir: the folder, as for :meth:`save_state`. None: with automatic naming, the highest number.
            load_kwargs: for :func:`torch.load`, as ``{"weights_only": False}``, which lets the files execute code.
                Without it, states of registered objects may hold objects of the notebook's own classes.
            **model_options: ``strict=False`` accepts other names of weights than the models have; ``map_location``:
                ``"cpu"`` (default) or ``"on_device"``, where weights and optimizers are read to.

        Raises:
            ValueError: there is no such folder.
            CheckpointError: the checkpoint is damaged, or does not fit this job; says what and where.
            TypeError: an unknown ``map_location`` or option.
        """
        load_state.load_state(self._checkpoints, self._saver, input_dir, load_kwargs, **model_options)

    def register_for_checkpointing(self, *objects: Any, per_rank: bool | None = None) -> None:
        """Have ``save_state`` and ``load_state`` include these objects, in workers, too, if it is called in a cell.

        Args:
            *objects: have ``state_dict()``, which every rank calls, and ``load_state_dict(state)``. Tensors of which
                ranks hold shards are written in full.
            per_rank: True: each rank has its own state, for as many ranks. False: all load rank 0's. None: each rank
                has its own where the states differ, buffers of modules aside.

        Raises:
            ValueError: some have not; lists them. None is registered then.
        """
        self._checkpoints.register(objects, per_rank)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before ``save_state`` writes whole weights.

        Shards are written before it is called.

        Args:
            hook: gets the user's own modules, without parallel wrappers and ``torch.compile``, their state dicts, and
                the folder to write to, which takes its place when the checkpoint is complete. State dicts that it takes
                out of ``weights`` are not written.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` loads weights.

        Args:
            hook: gets the models, as for saving, and the folder. Models that it takes out of ``models`` are not loaded.
                Those whose shards an ``fsdp_plugin`` or ``deepspeed_plugin`` has saved are loaded before: it gets none.

        Returns:
            A handle whose ``remove()`` takes the hook back.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    # --- weights and single objects ----------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full weights of a prepared model.

        Where every rank holds a shard of them, all ranks must call it; the main process of every machine gets them, in
        CPU memory, the others an empty dict.

        Args:
            model: what :meth:`prepare` returned.
            unwrap: False: with the names that its wrappers give them.
        """
        return self._checkpoints.strategy.state_dict(plain_module(model) if unwrap else model)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights, to be read without nblaunch. Call it on all ranks; the main process writes.

        Writes ``model.safetensors``, or shards ``model-00001-of-0000N.safetensors`` and their index. Weights that the
        folder held before go when the new ones are complete; other files stay. No rank waits for the writing one.

        Args:
            model: prepared or not.
            save_directory: there on every rank when the call returns.
            max_shard_size: bytes of tensors per file, as a number or as in ``"5GB"``.
            safe_serialization: safetensors' format; False: torch's, in ``pytorch_model.bin``.

        Raises:
            ValueError: ``save_directory`` is a file, or ``max_shard_size`` is not a size.
            RuntimeError: a parameter is on the meta device.
        """
        if self._checkpoints.is_writer or self._checkpoints.strategy.holds_shards:
            weights = self.get_state_dict(model)
            if self._checkpoints.is_writer:
                model_files.save_sharded(weights, Path(save_directory), max_shard_size, safe_serialization)
        make_folder(Path(save_directory))  # for what every rank writes beside the weights

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save one object with ``torch.save`` on the main process; the others do nothing.

        A failure leaves the file as it was.

        Args:
            obj: what to save.
            f: a path, or a binary file that is open.
            safe_serialization: safetensors' format, for a dict of tensors.

        Raises:
            CheckpointError: ``obj`` has weights of which this rank holds but a shard.
        """
        model_files.save_object(obj, f, safe_serialization, self._checkpoints.is_writer)

    # --- tracking ----------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers chosen by ``log_with``. They run on the main process, unless their class demands more.

        Those started in a notebook cell are started once more in a worker, with the same arguments, where they are
        first used there: a run of its own. A call in the function that is launched takes the place of that in the cell.

        Args:
            project_name: what runs are filed under.
            config: settings to keep with the run, as learning rate and seed: a mapping, a dataclass, a namespace of
                argparse or an object whose attributes are the settings. Not changed.
            init_kwargs: further arguments by tracker name, as ``{"wandb": {"tags": ["a"]}}``.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: Any = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values from the main process: to the trackers, the dashboard and ``job.metrics``.

        Works without any tracker, too. Numbers and short texts reach the dashboard and ``job.metrics``, in Python's own
        types: an enum member as its value, a NumPy number or a tensor with one element as a number. Other objects
        reach only those trackers that know them. A tensor makes the process wait for its device.

        Args:
            values: by name; nested mappings get names such as ``loss/train``.
            step: a number that says what they belong to; None: not given. Charts count the calls where it is another
                object, and ``job.metrics`` has its text.
            log_kwargs: further arguments by tracker name.

        Example::

            accelerator.log({"loss": loss.item(), "lr": scheduler.get_last_lr()[0]}, step=step)
        """
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called ``name``; one that does nothing on ranks where it does not run.

        Args:
            name: as in ``log_with``.
            unwrap: True: the library's own run object instead.

        Raises:
            ValueError: there is none, or it is not started.
        """
        return self._trackers.get(name, unwrap)

    # --- progress and the end ----------------------------------------------------------------------------------------

    def progress(
        self, iterable: Iterable[T], total: int | None = None, desc: str | None = None
    ) -> Iterator[T]:
        """Iterate over ``iterable`` and show its steps on the dashboard. Prepared loaders are shown by themselves.

        Args:
            iterable: anything; a prepared loader is passed through.
            total: its length where ``len`` doesn't know it.
            desc: a word about it, shown as this rank's status line in a launched worker. With "epoch" in it, the
                items are epochs: the dashboard shows "2/6" in their column instead.

        Example::

            for text in accelerator.progress(texts, desc="tokenizing"):
                tokens.append(tokenize(text))
        """
        if isinstance(iterable, PreparedLoader):
            return iter(iterable)
        return self._shared.show_progress(iterable, total, desc)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Run the block under torch's profiler, on every rank. A collective where traces are written.

        Args:
            profile_handler: what is recorded, and the folder for traces, if any; None: the ``ProfileKwargs`` among
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
            self.wait_for_everyone()  # all traces are there when the block has ended

    def end_training(self) -> None:
        """End trackers and leave the process group, once the last checkpoint is on disk. Call it last, on all ranks.

        CheckpointError where that checkpoint could not be written.
        """
        try:
            self._saver.close()
        finally:
            self._trackers.finish()
            self.destroy_process_group()
