"""Initialise the modules of a model on the meta device, and find tensors that remain uninitialised.

``weights.py`` initialises one module after the other, so no rank ever holds the whole model.

    StandIns        the model's tensors until then: only shapes, except in the current module
    unwritten       creates tensors that show which elements were not written
    constructor     writes the tensors as building the model on the CPU would
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import nn

from nblaunch.weights.state_dicts import is_quantised_weight

_META = "meta"


class StandIns:
    """Replaces all tensors of a model with meta tensors that have the same ties, in a ``with`` block.

    The code that initialises one module may also write to others: ``_init_weights`` of transformers' attention layers
    writes to their projections. Such writes to meta tensors do nothing and cost nothing. Quantised weights that
    have values are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {}
        self._places: dict[int, list[tuple[Any, str]]] = {}
        self._final: dict[int, torch.Tensor] = {}
        for module in model.modules():
            self._own[module] = []
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and (tensor.is_meta or not is_quantised_weight(tensor)):
                        self._own[module].append((name, tensor))
                        self._places.setdefault(id(tensor), []).append((held, name))
                        self._final[id(tensor)] = tensor

    def of(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that ``module`` directly held before the block, with their names."""
        return self._own[module]

    def show(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Put ``other`` in place of a tensor, as a parameter if the tensor is one."""
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        self._put(id(tensor), other)

    def hide_again(self, module: nn.Module) -> None:
        """Put meta tensors back into ``module`` and its submodules, where initialisation replaced them."""
        for part in module.modules():
            for name, tensor in self._own.get(part, ()):
                current = getattr(part, name, None)
                if current is None or not current.is_meta:
                    self._hide(tensor)

    def _hide(self, tensor: torch.Tensor) -> None:
        self.show(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))

    def replace(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Put ``other`` in place of a tensor when the block ends."""
        self._final[id(tensor)] = other

    def _put(self, key: int, tensor: torch.Tensor) -> None:
        for held, name in self._places[key]:
            held[name] = tensor

    def __enter__(self) -> StandIns:
        for tensor in list(self._final.values()):
            self._hide(tensor)
        return self

    def __exit__(self, *exception: object) -> None:
        for key, tensor in self._final.items():
            self._put(key, tensor)


# The byte that fills unwritten integers and booleans; written booleans are 0 or 1.
_UNWRITTEN_BYTE = 0xAA


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the shape and dtype of ``like``, filled with a marker for unwritten elements."""
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, torch.nan, dtype=like.dtype)
    tensor = torch.empty(like.shape, dtype=like.dtype)
    tensor.reshape(-1).view(torch.uint8).fill_(_UNWRITTEN_BYTE)
    return tensor


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether any element has the marker of :func:`unwritten`; for one-byte integers, whether all have."""
    if not tensor.numel():
        return False
    num_bytes = tensor.element_size()
    if tensor.is_floating_point() or tensor.is_complex():
        comparable = tensor.float() if num_bytes == 1 else tensor  # torch can't compare float8
        return bool(comparable.isnan().any())
    is_blank = tensor.contiguous().reshape(-1).view(torch.uint8) == _UNWRITTEN_BYTE
    if num_bytes == 1 and tensor.dtype != torch.bool:  # a written integer may equal the marker
        return bool(is_blank.all())
    return bool(is_blank.view(-1, num_bytes).all(dim=1).any())


def constructor(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return a function that initialises one module as building the model on the CPU would, if possible.

    The constructor of the module's class calls ``reset_parameters``. Models of transformers then apply their
    ``_init_weights`` to each of their modules outside of nested models, inner modules first. This includes containers,
    since ``_init_weights`` may write to their contents. For other models, the function calls only the outermost
    model's ``_init_weights``, with the module.
    """
    around: dict[str, list[nn.Module]] = {}  # name -> the module and its parents, innermost first
    for name, module in model.named_modules():
        around[name] = [module, *(around[name.rpartition(".")[0]] if name else ())]
    containers = {modules[0]: modules for modules in around.values()}
    of_model = None if _is_of_transformers(model) else getattr(model, "_init_weights", None)

    def construct(module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if _takes(reset):
            with suppress(NotImplementedError):
                reset()
        first = 0
        for position, owner in enumerate(containers[module]):
            if _is_of_transformers(owner):
                for part in containers[module][first : position + 1]:
                    owner._init_weights(part)  # type: ignore[operator]
                first = position + 1
        if _takes(of_model, module):
            of_model(module)

    return construct


def _takes(method: Any, *args: Any) -> TypeGuard[Callable[..., Any]]:
    """Return whether a method accepts these arguments; a method of the same name may serve another purpose."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _is_of_transformers(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
