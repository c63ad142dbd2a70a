"""A user's own ``torch.save`` in a job whose weights lie in parts: each file has what one rank holds.

Torch writes such a file without a word, and the rest of the model is gone when the job ends. It is warned of where it
is written; the warning names what to do instead.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nblaunch import formatting
from nblaunch.errors import warn
from nblaunch.training.collectives import dtensor


def watch() -> None:
    """Have ``torch.save`` warn of parts, for the rest of this process."""
    original = torch.save
    if getattr(original, "warns_of_parts", False):
        return

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        count = dtensor.num_torn(obj)
        if count:
            warn(
                f"torch.save writes only this rank's parts of {formatting.count(count, 'tensor')}, from which no model "
                "can be put together. Save whole weights with accelerator.save_model(model, folder), or take them from "
                "accelerator.get_state_dict(model), called on all ranks"
            )
        original(obj, *args, **kwargs)

    save.warns_of_parts = True  # type: ignore[attr-defined]
    torch.save = save
