"""Hooks on libraries that the user's function may import before or after the worker starts.

Progress of code that does not use nblaunch: hooks count optimizer steps, tqdm updates and parameters of new modules
in the rank's slot of the board. The counts distinguish a working rank from a hung one, and show which ranks built a
model instead of receiving it. A step also keeps alive the process groups that it may have used. Longer garbage
collections are spans on the board.

Display: tqdm and rich write plain lines.

A ``Trainer`` or ``TrainingArguments`` of transformers that a notebook cell created must adapt to the worker. Both
store facts about their process: device, number of GPUs, batch size per process, an Accelerator. These attributes are
recomputed when one of them is first used on an object that another process created.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from nblaunch import env, packages
from nblaunch.host import waits
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter
from nblaunch.worker.optimizer_steps import steps

_SHORTEST_COLLECTION_S = 1e-3
"""Shortest garbage collection that is recorded; most take microseconds."""

_replaced: list[Any] = []
"""Functions that hooks have replaced. Freeing a function writes to every object that its code refers to, and would copy
those pages of the kernel's memory."""


def count_progress(slot: Slot) -> None:
    """Count progress on ``slot`` from now on, even in libraries that are imported later."""
    packages.observe_when_imported("torch.optim.optimizer", lambda module: steps.watch(module, slot))
    packages.observe_when_imported("torch.nn.modules.module", lambda module: _watch_parameters(module, slot))
    packages.observe_when_imported("tqdm.std", lambda module: _watch_bars(module, slot))
    if slot.spans is not None:
        gc.callbacks.append(_recorder_of_collections(slot.spans))


def _watch_parameters(module: Any, slot: Slot) -> None:
    import torch

    def count(owner: Any, name: str, parameter: Any) -> None:
        # Parameters of lazy layers have no size yet.
        if parameter is not None and not torch.nn.parameter.is_lazy(parameter) and not parameter.is_meta:
            slot.built_bytes += parameter.numel() * parameter.element_size()

    module.register_module_parameter_registration_hook(count)


def _watch_bars(module: Any, slot: Slot) -> None:
    """Count updates of bars, at most ten per second while the function iterates over a bar."""
    update = module.tqdm.update

    @packages.replaces(module.tqdm, "update")
    def update_and_note(self: Any, n: float | None = 1) -> Any:
        if n:
            slot.note_progress()
        return update(self, n)


def _recorder_of_collections(spans: SpanWriter) -> Callable[[str, dict[str, int]], None]:
    """Return the callback that Python calls before and after a garbage collection."""
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        now_s = monotonic()
        if phase == "start":
            began_s = now_s
        elif now_s - began_s >= _SHORTEST_COLLECTION_S:
            spans.put(SpanKind.GARBAGE, began_s, now_s)

    return note


def show_plain_text() -> None:
    """Make bars and consoles write plain text, whether a cell or the function imports their library.

    tqdm gets one status line per rank. Its notebook class overrides methods of the plain class to update a widget,
    which no worker can reach; without these overrides it behaves like the plain class. tqdm's lock is replaced
    as well, because processes share it: a worker that is killed while it holds the lock would stop every bar of the
    kernel for good.

    rich redraws live displays in a widget, or in a terminal by moving the cursor. A worker has neither, and every
    frame would stay in the cell. A live display therefore writes only its last state, even on consoles that the
    kernel created.
    """
    packages.observe_when_imported("tqdm.std", _keep_to_one_line)
    packages.observe_when_imported("tqdm.notebook", _undo_widgets)
    packages.observe_when_imported("rich.console", _be_a_printer)
    packages.observe_when_imported("rich.live", lambda live: _name_clock(live._RefreshThread, "rich"))
    packages.observe_when_imported(
        "tensorboard.summary.writer.event_file_writer",
        lambda module: _name_clock(module._AsyncWriterThread, "tensorboard"),
    )


def _keep_to_one_line(std: Any) -> None:
    _renew_lock(std)
    os.register_at_fork(after_in_child=partial(_renew_lock, std))  # a thread of the worker may hold it
    std.tqdm._instances.clear()
    _replaced.append(std.tqdm.moveto)
    std.tqdm.moveto = _stay
    _name_clock(std.TMonitor, "tqdm")


def _name_clock(cls: Any, library: str) -> None:
    """Name a class's threads, which work at intervals, so that the launcher sees when they are idle."""
    packages.call_before(cls, "run", lambda thread: waits.name_as_clock(library))


def _renew_lock(std: Any) -> None:
    _replaced.append(getattr(std.tqdm, "_lock", None))
    std.tqdm.set_lock(threading.RLock())


def _undo_widgets(notebook: Any) -> None:
    cls = notebook.tqdm_notebook
    for name in ("__init__", "__iter__", "update", "close", "reset", "clear", "display", "status_printer"):
        if name in vars(cls):
            _replaced.append(vars(cls)[name])
            delattr(cls, name)


def _stay(self: Any, lines: int) -> None:
    """Do not move the cursor, because a log has none. Nested bars share the rank's status line."""


def _be_a_printer(console: Any) -> None:
    console.Console.is_jupyter = property(lambda self: False, _ignore)
    console.Console.is_dumb_terminal = property(lambda self: True)


def _ignore(self: object, value: object) -> None:
    """Ignore the value that a console assigns to the property."""


_MARK = "_nblaunch_worker"
"""Attribute that names the process that computed an object's other attributes. It is plain text, because training
arguments are saved to files.
"""


_ARGUMENT_NAMES = ("_setup_devices", "_n_gpu", "distributed_state")
_TRAINER_NAMES = (
    "accelerator",
    "gather_function",
    "_train_batch_size",
    "is_fsdp_enabled",
    "is_deepspeed_enabled",
)


def renew_objects() -> None:
    """Adapt ``Trainer`` and ``TrainingArguments`` to this worker, as soon as they are imported."""
    worker = os.urandom(8).hex()
    packages.observe_when_imported(
        "transformers.training_args", lambda module: _watch_arguments(module, worker)
    )
    packages.observe_when_imported("transformers.trainer", lambda module: _watch_trainers(module, worker))


def _watch_arguments(module: Any, worker: str) -> None:
    cls = module.TrainingArguments
    find_out = getattr(cls._setup_devices, "func", None) or cls._setup_devices.fget

    def renew(arguments: Any) -> None:
        vars(arguments)["_setup_devices"] = find_out(arguments)

    for name in _ARGUMENT_NAMES:
        setattr(cls, name, _Renewed(name, worker, renew, ()))


def _watch_trainers(module: Any, worker: str) -> None:
    def renew(trainer: Any) -> None:
        _ = trainer.args.device  # joins the process group with the settings of the arguments
        trainer._train_batch_size = trainer.args.train_batch_size
        trainer.create_accelerator_and_postprocess()

    for name in _TRAINER_NAMES:
        setattr(module.Trainer, name, _Renewed(name, worker, renew, _TRAINER_NAMES))


class _Renewed:
    """An attribute that is recomputed, together with others, on an object that another process created.

    Args:
        name: name of the attribute.
        worker: name of this process.
        renew: recomputes all attributes of an object that belong together.
        evidence: attributes that show that another process created an object; such an object has at least one
            of them. If this is empty, all objects are treated in this way, because their class computes the
            attribute on first use.
    """

    def __init__(self, name: str, worker: str, renew: Callable[[Any], None], evidence: Sequence[str]) -> None:
        self._name = name
        self._worker = worker
        self._renew = renew
        self._evidence = evidence

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        values = vars(instance)
        self._update(instance, values)
        try:
            return values[self._name]
        except KeyError:
            raise AttributeError(
                f"{type(instance).__name__!r} object has no attribute {self._name!r}"
            ) from None

    def __set__(self, instance: Any, value: Any) -> None:
        self._update(instance, vars(instance))
        vars(instance)[self._name] = value

    def _update(self, instance: Any, values: dict[str, Any]) -> None:
        if values.get(_MARK) == self._worker:
            return
        values[_MARK] = self._worker
        if not self._evidence or not values.keys().isdisjoint(self._evidence):
            self._renew(instance)


# --- launchers of other libraries -------------------------------------------------------------------------------------

_LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_LIGHTNING_LAUNCHER = "{}.strategies.launchers.multiprocessing"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ENDED_CHILD = ("ProcessRaisedException", "ProcessExitedException")


def adapt_groups(topology: Topology) -> None:
    """Make ways to form process groups without a launcher work in a worker, or raise an error."""
    _reject_launchers(topology)
    _let_ranks_meet_elsewhere(topology)
    _let_spawned_ranks_meet(topology)


def _reject_launchers(topology: Topology) -> None:
    """Make Lightning's multi-process launchers raise an error in this worker, if the job has several ranks.

    Otherwise, each of N ranks would start N processes, which would all join with this rank's address and
    number. They would disturb each other and report only failed connections.
    """
    if topology.world_size == 1:
        return

    def raise_error(launcher: Any) -> None:
        raise RuntimeError(
            f"this strategy starts processes of its own, but rank {topology.rank} is already one of the "
            f"{topology.world_size} processes that nblaunch has started. Use strategy='ddp', with "
            f"devices={topology.local_world_size}, instead of 'ddp_notebook', 'ddp_fork' or 'ddp_spawn'"
        )

    def watch(module: Any) -> None:
        packages.call_before(module._MultiProcessingLauncher, "launch", raise_error)

    for package in _LIGHTNING:
        packages.observe_when_imported(_LIGHTNING_LAUNCHER.format(package), watch)


def _let_ranks_meet_elsewhere(topology: Topology) -> None:
    """Let ranks form their group at an address of their own: a ``tcp://`` URL or another ``MASTER_PORT``.

    Because of torchrun's variables, every rank would wait at that address for the launcher's store, which
    exists only at the launcher's own address.
    """

    def watch(module: Any) -> None:
        create = module._create_c10d_store

        @packages.replaces(module, "_create_c10d_store")
        def create_at_rank_0(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if port == topology.master_port:
                return create(hostname, port, *args, **kwargs)
            with env.patched({_AGENT_STORE: None}):
                return create(hostname, port, *args, **kwargs)

    packages.observe_when_imported("torch.distributed.rendezvous", watch)


def _let_spawned_ranks_meet(topology: Topology) -> None:
    """Let processes of ``torch.multiprocessing.spawn`` host their own store, as they do under plain Python.

    Because of torchrun's variables, they would wait for the launcher's store at whatever address they choose.
    If the job has several ranks, the ranks' groups need the same port, which raises an error. A single rank
    gives its processes a free port instead.
    """

    def watch(module: Any) -> None:
        start = module.start_processes

        @packages.replaces(module, "start_processes", sys.modules[module.__package__])
        def start_without_store(*args: Any, **kwargs: Any) -> Any:
            port = {"MASTER_PORT": str(_free_port())} if topology.world_size == 1 else {}
            with env.patched({_AGENT_STORE: None, **port}):  # the rank itself may still join a group
                return start(*args, **kwargs)

    packages.observe_when_imported("torch.multiprocessing.spawn", watch)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def explain_launcher(error: BaseException) -> tuple[str, ...]:
    """Return a sentence about the function's own processes, if one of them has failed."""
    kind = type(error)
    if kind.__name__ not in _ENDED_CHILD or not kind.__module__.startswith("torch.multiprocessing"):
        return ()
    return (
        "the function started this process itself, with torch.multiprocessing. If it was meant to be a rank, call its "
        "function directly: nblaunch has already started one process per rank. Or launch with num_processes=1",
    )
