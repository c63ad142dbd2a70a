"""What the XLA runtime says of itself, without waiting for the device: compilations, and memory."""

from __future__ import annotations

from nblaunch.backends import xla_library
from nblaunch.backends.compile_watch import Counters


def counters() -> Counters:
    """Of the compiler, since the process began."""
    metrics = xla_library.part("debug.metrics")
    # Not metrics_report(): it takes a hundred times longer and initialises the runtime.
    compiled = metrics.metric_data("CompileTime")
    fallbacks = {
        name: metrics.counter_value(name) or 0
        for name in metrics.counter_names()
        if name.startswith("aten::")
    }
    return Counters(
        metrics.counter_value("UncachedCompile") or 0, compiled[1] / 1e9 if compiled else 0.0, fallbacks
    )


def memory() -> tuple[int, int, int] | None:
    """Bytes of the default device: taken, at most so far, all there are. None where the runtime does not tell.

    Source: ``torch_xla.core.xla_model.get_memory_info``; the peak is missing from older runtimes' answer.
    """
    try:
        told = xla_library.part("core.xla_model").get_memory_info()
    except RuntimeError:
        return None
    taken = int(told["bytes_used"])
    return taken, int(told.get("peak_bytes_used", taken)), int(told["bytes_limit"])
