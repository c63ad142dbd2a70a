"""Release device memory, find the largest batch that fits, and build modules without allocating memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from nblaunch import context


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Build modules in the block with parameters on the ``meta`` device, where they have a shape but no memory.

    Fill them with ``load_checkpoint_in_model(model, checkpoint)`` before the model is prepared.

    Args:
        include_buffers: whether to do the same for buffers, and for all other tensors created in the block.
    """
    return init_on_device("meta", include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules in the block with their parameters on ``device``; each is moved as soon as it is created.

    Args:
        device: target device.
        include_buffers: whether to create buffers, and all other tensors in the block, on this device too.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return

    def move(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        bare = parameter.detach()
        on_device = bare.to(device)
        if on_device is bare:
            return None  # unchanged, so that tied weights stay tied
        moved = torch.nn.Parameter(on_device, requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


# Parts of the error messages from allocators that raise a general error type when they run out of memory.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's answer to batches that are too large for its workspace
    "DefaultCPUAllocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "RESOURCE_EXHAUSTED",
)


def release_memory(*objects: Any) -> list[None]:
    """Release memory: ``a, b = release_memory(a, b)``.

    Returns:
        One None per argument; assigning them drops the caller's references.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached device memory; with ``garbage_collection``, also memory that only reference cycles hold."""
    if garbage_collection:
        gc.collect()
    context.current().backend.empty_cache()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether ``exception`` means that a device or the host has run out of memory."""
    if isinstance(exception, MemoryError) or type(exception).__name__ == "OutOfMemoryError":
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate ``function(batch_size, ...)`` to run again with smaller sizes until it fits in memory.

    Example::

        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model):
            ...

        train(model)

    Args:
        function: takes the batch size as its first argument, which callers omit.
        starting_batch_size: the first size that the first call tries; later calls start with the size that fitted.
        reduce_batch_size_fn: returns the next size to try; None: 90 % of the last size.

    Raises:
        TypeError: raised by a call if the caller passes the batch size, or if the function takes none.
        RuntimeError: raised by a call if not even one sample fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    batch_size = starting_batch_size  # later calls start with the size that fitted

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_call(function, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Clear the cache outside the handler, because the error's traceback holds the batch that did not fit.
            clear_device_cache(garbage_collection=True)
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn else int(batch_size * 0.9)
        raise RuntimeError(f"{function.__name__} runs out of memory at every batch size down to 1")

    return call


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        inspect.signature(function).bind_partial(0, *args)
    except TypeError as error:
        raise TypeError(
            f"{function.__name__}: {error}. find_executable_batch_size passes the batch size as the first argument; "
            "leave it out of the call"
        ) from None
