"""A check for fp16's gradient scaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.training.checks.check import Check, Prepared

_NUM_OVERFLOWS = 10  # in a row: a scaler that starts too high needs a few


class CollapsedScale(Check):
    """fp16 gradients overflow in every step: the scaler keeps halving its scale, and skips all steps."""

    name = "loss_scale_collapsed"

    def begin_window(self) -> None:
        self._scale = 0.0
        self._num_overflows = 0

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        scaler = prepared.precision.scaler
        if scaler is None:
            return
        scale = scaler.get_scale()
        self._num_overflows += scale < self._scale
        self._scale = scale
        if self._num_overflows == _NUM_OVERFLOWS:
            self.report(
                f"fp16 gradients overflow in every step, and {_NUM_OVERFLOWS} steps in a row were skipped: the loss "
                f"scale has fallen to {scale:g}",
                "Look for a loss or an activation that is not finite, or use mixed_precision='bf16'",
            )

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._num_overflows = 0  # the scaler let the optimizer step
