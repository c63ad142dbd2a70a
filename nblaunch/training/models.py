"""Modules before and after ``prepare``: wrappers and how to remove them, ``torch.compile``, moves to the device.

    DistributedDataParallel( module )                           prepare returns this
    module                                                      unwrap_model returns this

and with compilation (TorchDynamoPlugin):

    OptimizedModule( DistributedDataParallel( module ) )
    OptimizedModule( module )

Functions that remove wrappers:

    uncompiled                    removes an outermost OptimizedModule
    without_parallel_wrappers     removes wrappers that communicate; the inner module may be compiled
    bare_module                   removes all wrappers around the user's module
    plain_module                  also removes wrappers inside the user's module, in a copy with the same tensors
    extract_model_from_parallel   the same, but can keep torch.compile (``prepare.py``)

If a device's tensors are of a different class than CPU tensors, moving a module replaces its parameters.
:class:`Replacements` ties the new parameters wherever layers shared the old ones, and gives them to existing
optimizers. It also handles parameters that ``fully_shard`` and fp8 replace.

Models that a device map has split are not moved. Quantised models are not moved if they have a device map or are
already on the device (``stays_in_place``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from nblaunch import context
from nblaunch.training.collectives import dtensor
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import TorchDynamoPlugin
from nblaunch.weights import is_quantised_weight, is_sharded, without_wrappers_inside


def is_compiled_module(module: Any) -> bool:
    """Return whether ``module`` is the wrapper that ``torch.compile`` puts around a module."""
    # The lookup avoids an import that takes a second. Before that import, nothing is compiled.
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return wrapper is not None and isinstance(module, wrapper)


def uncompiled(model: Any) -> Any:
    """Return the module inside a compiled one; return other objects unchanged."""
    return model._orig_mod if is_compiled_module(model) else model


def compiled_like(compiled: Any, module: torch.nn.Module) -> Any:
    """Return ``module`` compiled with the settings of ``compiled``. Compilation happens on the first call."""
    from torch._dynamo.eval_frame import OptimizedModule

    return compiled if compiled._orig_mod is module else OptimizedModule(module, compiled.dynamo_ctx)


def compile_model(model: torch.nn.Module, options: TorchDynamoPlugin) -> Any:
    """Compile ``model``, or its repeated blocks in place, if ``options`` say so; return the model."""
    if not options.is_on or is_compiled_module(model):
        return model
    kwargs = options.to_compile_kwargs()
    if not options.use_regional_compilation:
        return torch.compile(model, **kwargs)
    for block in repeated_blocks(model):
        block.compile(**kwargs)
    return model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of module lists whose members all have the same type, so that they share compiled code."""
    blocks: list[torch.nn.Module] = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len({type(block) for block in module}) == 1:
            blocks.extend(module)
    return blocks


_communicating: Any = (DistributedDataParallel, DataParallel)


def add_wrapper(kind: type) -> None:
    """Make :func:`without_parallel_wrappers` remove instances of ``kind``, which hold a module as ``.module``."""
    global _communicating
    if kind not in _communicating:
        _communicating += (kind,)


def without_parallel_wrappers(model: Any) -> Any:
    """Return the module inside any number of wrappers that communicate. The module may be compiled."""
    while isinstance(model, _communicating):
        model = model.module
    return model


def wrappers_and_module(model: Any) -> Iterator[Any]:
    """Yield ``model``, the wrappers inside it, and finally the user's module."""
    yield model
    while (inner := _inside(model)) is not model:
        yield (model := inner)


def bare_module(model: Any) -> Any:
    """Return the user's module without any wrappers around it."""
    *_, module = wrappers_and_module(model)
    return module


def plain_module(model: Any) -> Any:
    """Return the user's module without any wrappers around or inside it.

    Files use the names of its tensors; see ``weights.py``.
    """
    return without_wrappers_inside(bare_module(model))


def _inside(model: Any) -> Any:
    return model.module if isinstance(model, _communicating) else uncompiled(model)


class Replacements:
    """Records parameters that a move, ``fully_shard`` or fp8 replaced in ``prepare``, without keeping them alive.

    Parameters that replaced each other share one reference to the newest one, because the ones in between may be gone.
    """

    def __init__(self) -> None:
        self._newest = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Replacements, ()  # objects pickled together with it already have the new parameters

    def add(self, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
        """Record that ``new`` has replaced ``old``."""
        newest = self._newest.get(old) or _Newest()
        newest.reference = weakref.ref(new)
        self._newest[old] = self._newest[new] = newest

    def get(self, parameter: Any) -> Any:
        """Return the newest replacement of ``parameter``; the parameter itself if there is none."""
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
                owner._parameters[own_name] = new  # tied: two names for one parameter
            self.add(old, new)

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the new parameters. Move or shard its state like the parameters."""
        for group in optimizer.param_groups:
            for position, old in enumerate(group["params"]):
                new = self.get(old)
                if new is old:
                    continue
                group["params"][position] = new
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    # Step counters stay on the host, where torch's optimizers expect them.
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

    transformers and Accelerate store it as ``hf_device_map``: module name -> device, or ``"disk"``. If there are
    several maps, return the one with the most entries.
    """
    maps = (module.__dict__.get("hf_device_map") for module in model.modules())
    return max((candidate for candidate in maps if isinstance(candidate, Mapping)), key=len, default={})


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether a device map has split ``model``."""
    return len(device_map(model)) > 1


def is_quantised(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has quantised weights, from any library."""
    marks = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")  # transformers' models
    if any(module.__dict__.get(mark) for module in model.modules() for mark in marks):
        return True
    return any(is_quantised_weight(parameter) for parameter in model.parameters())


def stays_in_place(model: torch.nn.Module, process: JoinedProcess) -> bool:
    """Return whether ``prepare`` must not move ``model`` to this rank's device.

    Raises:
        ValueError: the model can't be trained on the devices that it is on.
    """
    if is_dispatched(model) and process.topology.world_size > 1:
        raise ValueError(
            "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: every rank "
            f"needs the whole model on its own device, but hf_device_map has {len(device_map(model))} entries. Load it "
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
