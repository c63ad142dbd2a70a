"""The default strategies: every rank holds the whole model.

Another strategy is used if a plugin, a ``parallelism_config``, an earlier Accelerator in the process or the launch
settings call for one (``Accelerator._choose_strategy``).

    DdpStrategy            torch's wrapper averages gradients during backward
    ReduceAtStepStrategy   the backend averages gradients when the optimizer steps, without a wrapper
    SingleStrategy         a single process

XLA averages gradients inside the graph of a step. A wrapper that reduces them in backward would split this graph. On
XLA, each rank keeps its own buffers, such as batch normalisation statistics; checkpoints contain rank 0's buffers.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from nblaunch.errors import warn
from nblaunch.training import models
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess, waiting
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.precision import Precision
from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.late_parameters import LateParameters, learns_graph
from nblaunch.weights import is_sharded_model


class ReduceAtStepStrategy(Strategy):
    """Gives all ranks the weights of rank 0, without a wrapper; the backend averages gradients at each step."""

    name = "reduce_at_step"
    unjoined = "on this device"

    def __init__(self) -> None:
        self._checksums: weakref.WeakKeyDictionary[torch.nn.Module, list[int | None]] = (
            weakref.WeakKeyDictionary()
        )

    def place(self, model: torch.nn.Module, process: JoinedProcess) -> None:
        """Compute the checksums of the weights while they are on the host, then move the model."""
        self._checksums[model] = _checksums(model)
        super().place(model, process)

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        """Broadcast the weights of rank 0 that differ from other ranks' weights.

        Ranks compare checksums, so workers that share the kernel's model send nothing. They compare only after the
        move: when workers build their models one after another, each worker waits until the previous one has moved its
        model.
        """
        checksums = self._checksums.pop(models.bare_module(model), None) or _checksums(model)
        everyones = operations.gather_object([checksums])
        if len({len(each) for each in everyones}) > 1:
            counts = ", ".join(f"rank {rank}: {len(each)}" for rank, each in enumerate(everyones))
            raise ValueError(
                f"the {type(model).__name__} has a different number of tensors on some ranks ({counts})"
            )
        for tensor, *values in zip(_tensors(model), *everyones, strict=True):
            if len(set(values)) > 1 or None in values:  # weights from a device can't be compared
                operations.broadcast(tensor)
        return model


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers. Tied tensors appear once per name, because XLA separates them during a move."""
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return [tensor.detach() for tensors in named for _, tensor in tensors]


def _checksums(model: torch.nn.Module) -> list[int | None]:
    """Return a checksum for each tensor of a model; None for tensors on a device, which can't be compared."""
    return [checksum(tensor) if tensor.device.type == "cpu" else None for tensor in _tensors(model)]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bytes of a CPU tensor. Reading the bytes does not copy memory pages."""
    if hasattr(
        tensor, "__tensor_flatten__"
    ):  # it consists of several tensors, like torchao's quantised weights
        names, _ = tensor.__tensor_flatten__()
        return hash(tuple(checksum(getattr(tensor, name)) for name in names))
    flat = tensor.contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


_HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
}
_HOOK_WRAPPERS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


class DdpStrategy(Strategy):
    """Wraps models in :class:`torch.nn.parallel.DistributedDataParallel`, on CPU and GPU alike.

    DDP's constructor overwrites every rank's weights and buffers with rank 0's, so forked workers stop sharing the
    memory of these tensors. Frozen weights in host memory that are equal on all ranks are not overwritten, and stay
    shared.

    Args:
        handlers: the Accelerator's handlers, by type. If the user replaces one, models prepared later use the new one.
    """

    name = "ddp"

    def __init__(self, handlers: Mapping[type, Any]) -> None:
        self._handlers = handlers
        self._late: weakref.WeakKeyDictionary[DistributedDataParallel, LateParameters] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_late": dict(self._late)}  # weak references can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._late = weakref.WeakKeyDictionary(state["_late"])

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        if isinstance(model, DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # nothing to average, and DDP rejects such a model
        if is_sharded_model(model):
            raise ValueError(
                "Your model contains `DTensor` parameters, which is incompatible with DDP: its layers are sharded "
                "over ranks. Pass Accelerator(parallelism_config=ParallelismConfig(tp_size=...)) for a model that "
                "parallelize_module or a tp_plan has sharded; otherwise load it with "
                "device_map={'': accelerator.device} instead of 'auto'"
            )
        options = self._handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs()
        devices = None if process.device.type == "cpu" else [process.device]
        # DDP's constructor is a collective: it compares weights across ranks and copies them.
        with waiting(), warnings.catch_warnings(), _ignored_by_ddp(model, _common_frozen(model)):
            # torch 2.13 deprecates broadcast_buffers, but its replacements do not cover all uses yet.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            ddp = DistributedDataParallel(model, device_ids=devices, **options.to_kwargs())
        _register_comm_hook(ddp, options)
        self._late[ddp] = LateParameters(ddp, model)
        return ddp

    def backward(
        self, loss: torch.Tensor, divisor: int, precision: Precision, options: dict[str, Any]
    ) -> None:
        Strategy.backward(
            self, loss, divisor, precision, options
        )  # ``super()`` would create an object every time
        if not LateParameters.were_found:  # the usual case; iterating over weak keys costs several calls
            return
        for ddp, late in self._late.items():
            if late.parameters and ddp.require_backward_grad_sync:
                late.average_gradients(ddp._join_config.enable)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        ddp = _own(model)
        if not isinstance(ddp, DistributedDataParallel) or learns_graph(ddp):
            return nullcontext()
        return ddp.no_sync()

    @contextmanager
    def sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        # DDP decides in each forward pass whether the following backward pass reduces gradients. Overrule that decision
        # here.
        ddp = _own(model)
        if not isinstance(ddp, DistributedDataParallel):
            yield
            return
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        # Do what DDP's forward does with find_unused_parameters=False: make the reducer wait for every parameter.
        ddp.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any]) -> Iterator[_Ending | None]:
        models = [_own(each) for each in joinables]
        answering = [each for each in models if isinstance(each, Joinable)]
        if not answering:
            classes = ", ".join(type(each).__name__ for each in models) or "nothing"
            warn(
                "join_uneven_inputs has no effect, because none of its arguments is a model that was prepared for "
                f"training. It got {classes}."
            )
            yield None
            return
        ending = _Ending(answering[0])
        with Join([*answering, ending]):
            yield ending


class _Ending(Joinable):
    """Learns from ``Join`` whether this rank was among the last to reach the end of its data.

    Args:
        other: another member of the ``Join``, which determines the device and the process group.
    """

    def __init__(self, other: Joinable) -> None:
        super().__init__()
        self._other = other
        self.is_last = True

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``Join`` calls at the end."""
        return _EndingHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of ``Join``."""
        return self._other.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group for the collectives of ``Join``."""
        return self._other.join_process_group


class _EndingHook(JoinHook):
    def __init__(self, ending: _Ending) -> None:
        self._ending = ending

    def main_hook(self) -> None:
        """Do nothing: there are no collectives to join."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Record whether this rank was among the last."""
        self._ending.is_last = is_last_joiner


def _common_frozen(model: torch.nn.Module) -> list[str]:
    """Return the names of frozen weights that DDP must not send.

    These are weights in host memory that are equal on all ranks, and weights of types that DDP can't send.
    This is a collective. DDP would send rank 0's frozen weights to all ranks. Ranks that share the memory of
    a base model would then each get a copy of it.
    """
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    # DDP can't send tensors that consist of several tensors, like torchao's quantised weights.
    composed = [name for name, parameter in frozen.items() if hasattr(parameter.data, "__tensor_flatten__")]
    sums = [
        (name, checksum(parameter.detach()))
        for name, parameter in frozen.items()
        if parameter.device.type == "cpu" and name not in composed
    ]
    everyones = operations.gather_object([sums])
    common = set(sums).intersection(*everyones)
    return composed + [name for name, digest in sums if (name, digest) in common]


@contextmanager
def _ignored_by_ddp(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Set ``_ddp_params_and_buffers_to_ignore`` of ``model`` while a DDP is constructed around it."""
    before = model.__dict__.get("_ddp_params_and_buffers_to_ignore")
    # DDP reads this attribute. The DDP function that sets it would also mark the parameters permanently.
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = [*(before or ()), *names]
    try:
        yield
    finally:
        del model.__dict__["_ddp_params_and_buffers_to_ignore"]
        if before is not None:
            model.__dict__["_ddp_params_and_buffers_to_ignore"] = before


def _register_comm_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    name, wrapper = str(options.comm_hook), _HOOK_WRAPPERS.get(str(options.comm_wrapper))
    if name == "no":
        return
    is_approximate = name == "power_sgd"
    state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option) if is_approximate else None
    try:
        model.register_comm_hook(state, wrapper(_HOOKS[name]) if wrapper is not None else _HOOKS[name])
    except TypeError as error:
        raise ValueError(
            f"comm_hook={name!r} with comm_wrapper={str(options.comm_wrapper)!r} can't be used here: {error}. "
            "Without NCCL on GPUs, use fp16 instead of bf16"
        ) from error


def _own(prepared: Any) -> Any:
    """Return the object that communicates: the model inside a compiled one, or the optimizer in a prepared one."""
    return prepared.optimizer if isinstance(prepared, AcceleratedOptimizer) else models.uncompiled(prepared)


class ReplicatedPlugin(StrategyPlugin):
    """Builds the strategy for replicas: a single process, DistributedDataParallel, or averaging gradients in the
    optimizer step.
    """

    def __init__(self, handlers: Mapping[type, Any]) -> None:
        self._handlers = handlers

    def build(self, setup: TrainingSetup) -> Strategy:
        if setup.process.topology.world_size == 1:
            return SingleStrategy()
        if setup.process.backend.reduces_gradients_at_step:
            return ReduceAtStepStrategy()
        return DdpStrategy(self._handlers)


class SingleStrategy(Strategy):
    """Leaves the model of a single process unchanged."""

    name = "single"

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        return model
