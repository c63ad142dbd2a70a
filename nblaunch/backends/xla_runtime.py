"""torch_xla as it is installed here: found, imported when it is needed, and what its compiler does.

    kind, num_chips, version_mismatch      without importing it
    package, part                          import it; nothing else in nblaunch does
    CompileWatch                           which step compiled what, and why

A lazy device compiles a step's graph at its first step and whenever the graph changes: another input shape, another
branch, a value read in the middle. That takes from seconds to minutes each time and looks like a hang, so it is
reported: once per cause, with the step, the shapes and the time.

Nothing here initialises the runtime or waits for the device: of the compiler, only counters are read.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch import env, formatting
from nblaunch.backends.base import shapes_in_words, tensors
from nblaunch.host import tpu

INSTALL = 'pip install "nblaunch[tpu]"'


def kind() -> str:
    """Return what the runtime will compute on: the value of PJRT_DEVICE, or what torch_xla would choose."""
    wanted = env.read("PJRT_DEVICE")
    return wanted.upper() if wanted else "TPU" if num_chips() else "CPU"


def num_chips() -> int:
    """Return the number of TPU chips of this host."""
    if "torch_xla._internal.tpu" in sys.modules:
        found = int(sys.modules["torch_xla._internal.tpu"].num_available_chips())
    else:
        found = sum(tpu.chips().values())
    return found or tpu.device_files(
        env.read("PJRT_DEVICE") == "TPU" or bool(env.read("TPU_ACCELERATOR_TYPE"))
    )


def version_mismatch() -> str | None:
    """Return what to do where torch and torch_xla are of different releases, in which case the import fails."""
    import importlib.metadata  # 10 ms that a fresh interpreter does not need

    try:
        torch, xla = (importlib.metadata.version(name) for name in ("torch", "torch_xla"))
    except importlib.metadata.PackageNotFoundError:
        return None  # not installed by pip: nothing is known
    release = ".".join(xla.split(".")[:2])
    if torch.split("+")[0].split(".")[:2] == release.split("."):
        return None
    return (
        f"torch {torch} and torch_xla {xla} do not fit each other: they must be of one release. "
        f"Install torch=={release}.*, or another torch_xla: {INSTALL}"
    )


def package() -> Any:
    """Import torch_xla and return it.

    Raises:
        RuntimeError: it can't be imported, with the reason.
    """
    if "torch_xla" in sys.modules:
        return sys.modules["torch_xla"]
    try:
        # Left alone, the import would fix PJRT_DEVICE for the whole process.
        with env.patched({"PJRT_DEVICE": kind(), **readable_accelerator_type()}):
            for name in ("core.xla_model", "runtime", "debug.metrics", "distributed.xla_backend"):
                importlib.import_module(f"torch_xla.{name}")
    except (ImportError, OSError) as error:
        raise RuntimeError(version_mismatch() or f"torch_xla can't be imported: {error}") from error
    return sys.modules["torch_xla"]


def part(name: str) -> Any:
    """Return a module of torch_xla, as ``"core.xla_model"``, once the package is imported."""
    return importlib.import_module(f"torch_xla.{name}")


def readable_accelerator_type() -> dict[str, str]:
    """Return ``TPU_ACCELERATOR_TYPE`` with a number of chips, where it has none: torch_xla can't parse it without."""
    kind = env.read("TPU_ACCELERATOR_TYPE")
    return {"TPU_ACCELERATOR_TYPE": f"{kind}-{num_chips()}"} if kind and "-" not in kind else {}


def counters() -> Counters:
    """Return the compiler's counters since the process began."""
    metrics = part("debug.metrics")
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
    """Return bytes of the default device: taken, peak, total; None where the runtime does not report them.

    Source: ``torch_xla.core.xla_model.get_memory_info``; the peak is missing from older runtimes' answer.
    """
    try:
        info = part("core.xla_model").get_memory_info()
    except RuntimeError:
        return None
    taken = int(info["bytes_used"])
    return taken, int(info.get("peak_bytes_used", taken)), int(info["bytes_limit"])


WARM_UP_STEPS = 2
"""Steps that compile in any case: the optimizer's state appears in the first, and is an input of the second."""

_TRAINING = "training"
_READS = "aten::_local_scalar_dense"


@dataclass(frozen=True)
class Counters:
    """The compiler's counters at one moment, since the start of the process.

    Args:
        num_graphs: graphs that were compiled.
        compile_s: time that took.
        fallbacks: operation -> how often it ran on the CPU, because the device does not have it.
    """

    num_graphs: int = 0
    compile_s: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Phase:
    """Steps of one kind, as "training": how many of each shape there were, and what they compiled."""

    shapes: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_graphs: int = 0
    compile_s: float = 0.0
    is_reported: bool = False


class CompileWatch:
    """Watches one process's steps.

    Args:
        read: gives the counters now.
        note: takes a sentence for the user.
        compiling: takes whether the process is, most likely, compiling.
        fact: takes how many graphs were compiled in all, a name and a few words.
    """

    def __init__(
        self,
        read: Callable[[], Counters],
        note: Callable[[str], None],
        compiling: Callable[[bool], None],
        fact: Callable[[str, str], None],
    ) -> None:
        self._read = read
        self._note = note
        self._compiling = compiling
        self._fact = fact
        self._phases: dict[str, _Phase] = {}
        self._before = self._first = read()
        self._open: tuple[str, str] | None = None
        self._reported: set[str] = set()

    def begin_step(self, phase: str, batch: Any) -> None:
        """End the step before and begin one of ``phase`` on ``batch``."""
        self.end_step()
        shapes = describe(batch)
        known = self._phases.setdefault(phase, _Phase())
        known.num_steps += 1
        known.shapes[shapes] = known.shapes.get(shapes, 0) + 1
        self._open = (phase, shapes)
        self._compiling(known.shapes[shapes] <= WARM_UP_STEPS)

    def end_step(self) -> None:
        """Report what the current step has compiled, if there is one."""
        if self._open is None:
            return
        (phase, shapes), self._open = self._open, None
        now = self._read()
        num_graphs = now.num_graphs - self._before.num_graphs
        seconds = now.compile_s - self._before.compile_s
        self._compiling(False)
        if num_graphs:
            total, total_s = now.num_graphs - self._first.num_graphs, now.compile_s - self._first.compile_s
            self._fact("compilations", f"{formatting.count(total, 'graph')} compiled in {total_s:.1f} s")
        self._check_graphs(phase, shapes, num_graphs, seconds)
        self._check_fallbacks(now.fallbacks)
        self._before = now

    def end_loop(self) -> None:
        """Handle the end of a loader."""
        self.end_step()
        for phase in self._phases:
            self._report(phase)

    def _check_graphs(self, phase: str, shapes: str, num_graphs: int, seconds: float) -> None:
        known = self._phases[phase]
        if known.num_steps <= WARM_UP_STEPS and len(known.shapes) == 1:
            known.num_graphs += num_graphs
            known.compile_s += seconds
            return
        self._report(phase)
        if num_graphs == 0:
            return
        graphs = "a new graph" if num_graphs == 1 else f"{num_graphs} new graphs"
        step = f"{phase} step {known.num_steps} compiled {graphs} in {seconds:.1f} s"
        usual = _usual(known.shapes)
        if known.shapes[shapes] == 1:
            self._note_cause(
                f"{phase} shape",
                f"{step}: its batch is {shapes}, the others are {usual}. Every shape is compiled once: keep one batch "
                "size (even_batches=True, or drop_last=True) and pad sequences to a few fixed lengths",
            )
        elif known.shapes[shapes] > WARM_UP_STEPS:
            self._note_cause(
                f"{phase} graph",
                f"{step} although its batch is {shapes} as before: something else in the loop changes from step to "
                "step, as a Python number that enters a computation, a branch, or a value that is read by item()",
            )

    def _check_fallbacks(self, fallbacks: Mapping[str, int]) -> None:
        for name in sorted(fallbacks):
            count = fallbacks[name] - self._before.fallbacks.get(name, 0)
            if count <= 0:
                continue
            if name == _READS:
                text = (
                    "a value is read from the device in the middle of a step (item(), float(), print or `if` on a "
                    "tensor): each read cuts the graph in two and waits for the device. Read every few hundred steps, "
                    "or after the loop; accelerator.backward shows the loss by itself"
                )
            else:
                text = (
                    f"{name} runs on the CPU, because the device does not have it: its inputs and outputs travel "
                    "between host and device at every call"
                )
            self._note_cause(name, text)

    def _report(self, phase: str) -> None:
        """Report what the first steps of a phase compiled, once."""
        known = self._phases[phase]
        if known.is_reported or not known.num_graphs:
            return
        known.is_reported = True
        compiled = f"{formatting.count(known.num_graphs, 'graph')} compiled in {known.compile_s:.1f} s"
        shapes, others = next(iter(known.shapes)), self._phases.get(_TRAINING, _Phase()).shapes
        if phase == _TRAINING or not others or _first(shapes) in map(_first, others):
            self._note(f"{phase}: {compiled}, for batches of {shapes}")
            return
        self._note(
            f"{phase}: {compiled}, for batches of {shapes}, which differ from {_TRAINING}'s {_usual(others)}. Use the "
            "same batch size in both: what they have in common is compiled once then"
        )

    def _note_cause(self, cause: str, text: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            self._note(text)


def _usual(shapes: Mapping[str, int]) -> str:
    """Return the shapes of most steps."""
    return max(shapes, key=lambda one: shapes[one])


def _first(shapes: str) -> str:
    """Return the shape of a batch's first tensor, which an evaluation without targets has too."""
    return shapes.partition(",")[0]


def describe(batch: Any) -> str:
    """Return the shapes of a batch's tensors, as ``"32x64, 32"``."""
    return shapes_in_words(tensor.shape for tensor in tensors(batch)) or "no tensors"
