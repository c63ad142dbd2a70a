"""Copies of states in host memory, which training does not write to: for checkpoints written meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.training.checkpoints import loading
from nblaunch.training.collectives import dtensor


class CpuCopies:
    """Copies nested state dicts, into the same memory every time.

    New memory is what costs most of a first copy: the system clears it page by page. So the copies are kept, and only
    one state can be held at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def take(self, state: Any) -> Any:
        """Return ``state`` with a copy of every tensor; what was taken before is overwritten.

        Tensors that show the same memory share a copy, too. Leaves that are no tensors are kept as they are.
        """
        before, self._kept = self._kept, {}
        return self._copy(state, (), before, {})

    def _copy(
        self,
        state: Any,
        path: tuple[Any, ...],
        before: Mapping[tuple[Any, ...], torch.Tensor],
        seen: dict[Any, Any],
    ) -> Any:
        if dtensor.is_sharded(state):
            held = self._copy(dtensor.local(state), path, before, seen)
            return dtensor.on_host(state, held)
        if isinstance(state, torch.Tensor):
            view, _ = loading.view_of(state)
            copy = seen.get(view) if view is not None else None
            if copy is None:
                copy = seen[view] = self._kept[path] = _copy_into(before.get(path), state.detach())
            return copy
        if isinstance(state, Mapping):
            return {key: self._copy(value, (*path, key), before, seen) for key, value in state.items()}
        if isinstance(state, (list, tuple)) and not hasattr(state, "_fields"):
            return type(state)(self._copy(item, (*path, i), before, seen) for i, item in enumerate(state))
        return state


def _copy_into(kept: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        if not tensor.is_cuda or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.to("cpu", copy=True)
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)  # copied to without a detour
    return kept.copy_(tensor)
