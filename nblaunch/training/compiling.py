"""Compiled models: making them with :func:`torch.compile`, and taking them apart.

OptimizedModule( DistributedDataParallel( module ) )        as prepare leaves it
OptimizedModule( module )                                   as unwrap_model gives it back
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from nblaunch.training.options import TorchDynamoPlugin


def is_compiled_module(module: Any) -> bool:
    """Whether ``module`` is the wrapper that ``torch.compile`` puts around a module."""
    return isinstance(module, OptimizedModule)


def inner_of(model: Any) -> Any:
    """The module inside a compiled one; any other object as it is."""
    return model._orig_mod if is_compiled_module(model) else model


def around(compiled: Any, module: torch.nn.Module) -> Any:
    """``module`` compiled as ``compiled`` is. Nothing is compiled before it is called."""
    return compiled if compiled._orig_mod is module else OptimizedModule(module, compiled.dynamo_ctx)


def compile_model(model: torch.nn.Module, options: TorchDynamoPlugin) -> Any:
    """``model`` as ``options`` say: compiled as a whole, or its repeated blocks in place, or untouched."""
    if not options.is_on or is_compiled_module(model):
        return model
    kwargs = options.to_compile_kwargs()
    if not options.use_regional_compilation:
        return torch.compile(model, **kwargs)
    for block in repeated_blocks(model):
        block.compile(**kwargs)
    return model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Members of lists of modules of one type: the code of the first one fits all of them."""
    blocks: list[torch.nn.Module] = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len({type(block) for block in module}) == 1:
            blocks.extend(module)
    return blocks
