"""Modules before and after ``prepare``: wrappers and how they are taken off, ``torch.compile``, moves to the device.

    DistributedDataParallel( module )                           as prepare returns it
    module                                                      as unwrap_model returns it

and, if compiling was asked for (TorchDynamoPlugin):

    OptimizedModule( DistributedDataParallel( module ) )
    OptimizedModule( module )

What takes wrappers off:

    uncompiled                    an outermost OptimizedModule
    without_parallel_wrappers     those that communicate; what is inside may be compiled
    bare_module                   all around the user's own module
    plain_module                  those inside it, too, in a copy with the same tensors: its names are on disk
    extract_model_from_parallel   as these, and puts torch.compile back if asked (``prepare.py``)

Where a device's tensors are of another kind than the CPU's, a module that moves gets new parameters: those it shared
between layers are tied again, and optimizers that were built before get the new ones (:class:`Replacements`, which
also has those that ``fully_shard`` and fp8 replace).

Models that a device map has cut stay where they are, and quantised ones that have a device map or are on the device
already (``stays_in_place``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from nblaunch import context
from nblaunch.training.collectives import dtensor
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import TorchDynamoPlugin
from nblaunch.weights.plain_names import without_wrappers_inside
from nblaunch.weights.quantised import is_quantised_weight
from nblaunch.weights.sharded import is_sharded


def is_compiled_module(module: Any) -> bool:
    """Return whether ``module`` is the wrapper that ``torch.compile`` puts around a module."""
    return isinstance(module, OptimizedModule)


def uncompiled(model: Any) -> Any:
    """Return the module inside a compiled one; any other object as it is."""
    return model._orig_mod if is_compiled_module(model) else model


def compiled_like(compiled: Any, module: torch.nn.Module) -> Any:
    """Return ``module`` compiled as ``compiled`` is. Nothing is compiled before it is called."""
    return compiled if compiled._orig_mod is module else OptimizedModule(module, compiled.dynamo_ctx)


def compile_model(model: torch.nn.Module, options: TorchDynamoPlugin) -> Any:
    """Return ``model`` as ``options`` demand: compiled as a whole, or its repeated blocks in place, or untouched."""
    if not options.is_on or is_compiled_module(model):
        return model
    kwargs = options.to_compile_kwargs()
    if not options.use_regional_compilation:
        return torch.compile(model, **kwargs)
    for block in repeated_blocks(model):
        block.compile(**kwargs)
    return model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return members of lists of modules of one type: the code of the first one fits all of them."""
    blocks: list[torch.nn.Module] = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len({type(block) for block in module}) == 1:
            blocks.extend(module)
    return blocks


_communicating: Any = (DistributedDataParallel, DataParallel)


def add_wrapper(kind: type) -> None:
    """Have :func:`without_parallel_wrappers` know a class whose instances hold the user's module as ``.module``."""
    global _communicating
    if kind not in _communicating:
        _communicating += (kind,)


def without_parallel_wrappers(model: Any) -> Any:
    """Return the module inside any number of wrappers that communicate, of any origin; it may be a compiled one."""
    while isinstance(model, _communicating):
        model = model.module
    return model


def wrappers_and_module(model: Any) -> Iterator[Any]:
    """Yield ``model`` and all that is inside it, down to the user's own module, in any order of the wrappers."""
    yield model
    while (inner := _inside(model)) is not model:
        yield (model := inner)


def bare_module(model: Any) -> Any:
    """Return the user's own module."""
    while (inner := _inside(model)) is not model:
        model = inner
    return model


def plain_module(model: Any) -> Any:
    """Return the user's module without wrappers inside it: files have its names. See ``weights/plain_names.py``."""
    return without_wrappers_inside(bare_module(model))


def _inside(model: Any) -> Any:
    return model.module if isinstance(model, _communicating) else uncompiled(model)


class Replacements:
    """Parameters that ``prepare`` has replaced: by a move, ``fully_shard``, fp8. None of them is kept alive.

    Parameters that have replaced each other share one reference to the last of them: those between may be gone.
    """

    def __init__(self) -> None:
        self._newest = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Replacements, ()  # what is pickled with it has the new parameters already

    def add(self, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
        """Record that ``new`` has replaced ``old``."""
        newest = self._newest.get(old) or _Newest()
        newest.reference = weakref.ref(new)
        self._newest[old] = self._newest[new] = newest

    def get(self, parameter: Any) -> Any:
        """Return the parameter that has replaced ``parameter``, the last of several; itself where none has."""
        newest = self._newest.get(parameter)
        replacement = None if newest is None else newest.reference()
        return parameter if replacement is None else replacement

    @contextmanager
    def noted(self, model: torch.nn.Module) -> Iterator[None]:
        """Record which parameters of ``model`` are replaced in the block, and keep tied parameters tied."""
        before = dict(model.named_parameters(remove_duplicate=False))
        yield
        replaced: dict[int, torch.nn.Parameter] = {}
        for name, old in before.items():
            owner_name, _, own_name = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            now = owner._parameters[own_name]
            if now is old or now is None:
                continue
            new = replaced.setdefault(id(old), now)
            if new is not now:
                owner._parameters[own_name] = new  # tied: two names of one parameter
            self.add(old, new)

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer go on with the new parameters, its state for each where the parameter, or its part, is."""
        for group in optimizer.param_groups:
            for position, old in enumerate(group["params"]):
                new = self.get(old)
                if new is old:
                    continue
                group["params"][position] = new
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    # Counters of steps stay on the host, where torch's optimizers want them.
                    optimizer.state[new] = {
                        key: _beside(new, value) if isinstance(value, torch.Tensor) and value.ndim else value
                        for key, value in state.items()
                    }


class _Newest:
    reference: weakref.ref[torch.nn.Parameter]


def _beside(parameter: torch.nn.Parameter, state: torch.Tensor) -> torch.Tensor:
    held: torch.Tensor = dtensor.shard_like(state, parameter)
    return held if is_sharded(held) else held.to(dtensor.local(parameter).device)


def to_device(model: torch.nn.Module, process: JoinedProcess) -> None:
    """Move ``model`` to the device of ``process``."""
    with context.current().locks.semaphore() if process.backend.transfers_in_turn else nullcontext():
        process.backend.to_device(model, process.device)


def device_map(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the device map that ``model``, or a module in it, was loaded with; empty if there is none.

    transformers and Accelerate leave it as ``hf_device_map``: name of a module -> device, or ``"disk"``. Of several,
    the one with the most entries.
    """
    maps = (module.__dict__.get("hf_device_map") for module in model.modules())
    return max((candidate for candidate in maps if isinstance(candidate, Mapping)), key=len, default={})


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether a device map has cut ``model`` into pieces."""
    return len(device_map(model)) > 1


def is_quantised(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has quantised weights, of whichever library."""
    marks = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")  # transformers' models
    if any(module.__dict__.get(mark) for module in model.modules() for mark in marks):
        return True
    return any(is_quantised_weight(parameter) for parameter in model.parameters())


def stays_in_place(model: torch.nn.Module, process: JoinedProcess) -> bool:
    """Return whether ``model`` stays where it is when it is prepared, instead of moving to this rank's device.

    Raises:
        ValueError: it can't be trained from where it is.
    """
    if is_dispatched(model) and process.topology.world_size > 1:
        raise ValueError(
            "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: every rank "
            f"needs the whole model on its own device, and hf_device_map has {len(device_map(model))} entries. Load it "
            'with device_map={"": accelerator.device} inside the function, shard it with '
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()), or use num_processes=1"
        )
    if not is_quantised(model):
        return is_dispatched(model)
    places = {str(place) for place in device_map(model).values()}
    is_placed = bool(places)
    if "disk" in places or ("cpu" in places and process.device.type != "cpu"):
        raise ValueError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload: "
            f'hf_device_map has {", ".join(sorted(places))}. Load it with device_map={{"": accelerator.device}}'
        )
    if is_placed and not is_dispatched(model):
        for parameter in filter(is_quantised_weight, model.parameters()):
            _check_device(parameter.device, process.device)
    return is_placed or all(parameter.device == process.device for parameter in model.parameters())


def _check_device(held: torch.device, wanted: torch.device) -> None:
    if held.type != "meta" and held != wanted:
        raise ValueError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the "
            f"one you're training on: it is on {held}, and this rank trains on {wanted}. Load it inside the function "
            'with device_map={"": accelerator.device}, or on the CPU in the notebook and without a device_map'
        )
