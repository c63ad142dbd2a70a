"""Log messages and show progress bars in several processes: once instead of N times, or in rank order."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from nblaunch import context, env
from nblaunch.training.joining import current_topology
from nblaunch.training.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Create a ``tqdm.auto.tqdm`` bar on the main process of each machine; other processes stay silent.

    Args:
        *args: arguments for tqdm.
        main_process_only: if False, show a bar in every process.
        **kwargs: keyword arguments for tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise ImportError(
            "nblaunch.utils.tqdm needs tqdm, which is not installed: pip install tqdm"
        ) from None
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger that knows the rank of its process.

    All its logging methods take two more arguments:

    * ``main_process_only`` (default True): only the main process logs.
    * ``in_order`` (default False): all processes log, one after the other; all of them must make the call.

    An explicit ``stacklevel`` counts :meth:`log` as a frame, as in Accelerate's logger: 2 refers to the line
    of the call.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log ``msg % args`` in the chosen processes.

        Raises:
            RuntimeError: there is no Accelerator or PartialState, and the process is not a worker.
        """
        here = context.current()
        if here.training is None and not here.is_launched:
            raise RuntimeError(
                "a logger from get_logger needs to know the rank of this process; create an `Accelerator()` or "
                "`PartialState()` before the first message"
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not (in_order or self.isEnabledFor(level)):
            return
        kwargs.setdefault("stacklevel", 2)  # the caller's line
        msg, options = self.process(msg, kwargs)
        if in_order:
            # In a worker, this joins the job, which is safe only here, because all ranks make this call. Their log
            # levels may differ, so a rank that does not log must still take part in every barrier.
            state = PartialState()
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self.logger.log(level, msg, *args, **options)
                state.wait_for_everyone()
        elif current_topology().rank == 0 or not main_process_only:
            self.logger.log(level, msg, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with the rank prepended, and the arguments of the call merged with the adapter's."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return f"[RANK {current_topology().rank}] {msg}", kwargs

    @functools.lru_cache(None)  # noqa: B019 - adapters live as long as their module
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning as ``warning`` does, but only on the first call with the same arguments."""
        kwargs.setdefault("stacklevel", 3)
        self.log(logging.WARNING, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that knows about ranks.

    Args:
        name: as for :func:`logging.getLogger`, usually ``__name__``.
        log_level: a level such as ``"INFO"``; None: the variable ``ACCELERATE_LOG_LEVEL`` or, if it is not set,
            logging's own level.
    """
    logger = logging.getLogger(name)
    level = log_level or env.read("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
