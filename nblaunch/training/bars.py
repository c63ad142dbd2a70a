"""``tqdm`` for several processes: one bar instead of N."""

from __future__ import annotations

from typing import Any

from nblaunch.training.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A ``tqdm.auto.tqdm`` bar on the main process of each machine; silent on the others.

    Args:
        *args: as for tqdm, with ``kwargs``.
        main_process_only: False: a bar in every process.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise ImportError(
            "nblaunch.utils.tqdm shows bars of tqdm, which is not installed: pip install tqdm"
        ) from None
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
