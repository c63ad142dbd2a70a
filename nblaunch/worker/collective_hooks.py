"""Hooks on torch that record this rank's collectives, and the calls that start collectives from C++.

    ProcessGroup.allreduce, ...         called by all Python code, including torch's own, to start a collective
    torch.distributed._functional_...   called by DTensor
    DistributedDataParallel             the constructor, which compares ranks, and forward passes
    torch.autograd.backward, steps      start collectives from C++

Until the first process group with several ranks is created, nothing is recorded and the other hooks are not installed.
Compiled code has no hooks.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any
from zlib import crc32

from nblaunch import packages
from nblaunch.progress.local_gradients import LocalGradients
from nblaunch.wire.board import Slot
from nblaunch.wire.collective_calls import BACKWARD, COLLECTIVES, FORWARD, STEP, UNCOUNTED, UNEVEN, CallWriter
from nblaunch.wire.spans import SpanKind, SpanWriter
from nblaunch.worker.collective_recorder import NO_FORM, CollectiveRecorder, Form, OpenGroup

_Describe = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Records a method call, given the process group, the positional arguments and the keyword arguments."""


_PLACES = {kind: place for place, kind in enumerate(COLLECTIVES)}

_Owner = tuple[Callable[[], Any], OpenGroup | None, str]
"""A weak reference to an optimizer; the group that keeps its parameters in sync (None if there is none); and
the optimizer's share of a model."""

_REJECTED = (TypeError, ValueError, AttributeError, LookupError, StopIteration, RuntimeError)
"""Errors raised here for invalid arguments, before torch rejects them."""


def record_collectives(slot: Slot) -> Callable[[], int]:
    """Record this process's collectives in its slot from now on, even in modules that are imported later.

    Returns:
        A function that returns how many collectives this process has called.
    """
    if slot.call_memory is None:
        return int
    recorders: list[CollectiveRecorder] = []
    watch = partial(_begin, slot, os.getpid(), recorders)
    packages.observe_when_imported(
        "torch.distributed.distributed_c10d", lambda module: _at_first_group(module, watch)
    )
    return lambda: sum(recorder.num_collectives() for recorder in recorders)


def _begin(slot: Slot, pid: int, recorders: list[CollectiveRecorder]) -> None:
    """Start recording in ``slot`` if this is the worker ``pid``. A process forked by the worker writes to no slot."""
    writer = CallWriter(slot.call_memory if os.getpid() == pid else None)
    os.register_at_fork(after_in_child=writer.detach)
    recorders.append(CollectiveRecorder(writer))
    _watch(_Hooks(recorders[0]), slot)


@packages.defines_replacements
def _at_first_group(c10d: Any, watch: Callable[[], None]) -> None:
    """Call ``watch`` before the first group with several ranks is created. Until then, no other hook is needed."""
    cls = c10d.ProcessGroup
    make = cls.__init__
    held = vars(cls)["__init__"]  # binds to instances, unlike the value of cls.__init__

    @packages.replacement_of(make)
    def watch_and_make(pg: Any, *args: Any, **kwargs: Any) -> None:
        is_alone = bool(args) and type(args[-1]) is int and args[-1] == 1  # the size of the group
        if vars(cls)["__init__"] is watch_and_make and not is_alone:
            cls.__init__ = held
            watch()
        make(pg, *args, **kwargs)

    cls.__init__ = watch_and_make


def _watch(hooks: _Hooks, slot: Slot) -> None:
    packages.observe_when_imported("torch.distributed.distributed_c10d", hooks.watch_groups)
    if slot.spans is not None:
        watch_waits = partial(hooks.watch_waits, slot.spans)
        packages.observe_when_imported("torch.distributed.distributed_c10d", watch_waits)
    packages.observe_when_imported("torch.distributed._functional_collectives", hooks.watch_functional)
    packages.observe_when_imported("torch.nn.parallel.distributed", hooks.watch_ddp)
    packages.observe_when_imported("torch.distributed.algorithms.join", hooks.watch_joins)
    hooks.watch_steps_and_backward(slot)


def _no_owner() -> None:
    """Stand in for a reference to an optimizer that no longer exists."""


def _is_of_connection(error: Exception) -> bool:
    """Return whether an error comes from a collective that had begun, rather than from a check of its arguments."""
    return type(error).__name__.startswith("Dist")


class _Hooks:
    """The hooks of this process."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder = recorder
        self._reductions: dict[int, str] = {}
        self._transfers = count(1)
        self._models = count(1)
        self._is_uneven = False
        self._owners: dict[int, _Owner] = {}
        self._wrapped: list[weakref.ref[Any]] = []
        self.local_gradients = LocalGradients(self._wrapped)

    # --- process groups ----------------------------------------------------------------------------------------------

    def watch_groups(self, c10d: Any) -> None:
        """Record the collectives that Python code calls."""
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
            if hasattr(c10d.ReduceOp, name):
                self._reductions[int(getattr(c10d.ReduceOp, name))] = name
        for method, describe in self._methods().items():
            original = getattr(c10d.ProcessGroup, method, None)
            if original is not None:
                setattr(c10d.ProcessGroup, method, self._recording(original, describe))
        self._watch_new_groups(c10d)

    def _watch_new_groups(self, c10d: Any) -> None:
        """Record the creation of groups, because each member waits for the others during it."""
        create = getattr(c10d, "_new_process_group_helper", None)
        if create is None:
            return

        @packages.replaces(c10d, "_new_process_group_helper")
        def record_and_create(size: Any, rank: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            if ranks:  # empty for the default group
                with suppress(Exception):
                    self._recorder.note_new_group(tuple(ranks))
            return create(size, rank, ranks, *args, **kwargs)

    def _recording(self, original: Callable[..., Any], describe: _Describe) -> Callable[..., Any]:
        group_of = self._recorder.group_of

        @packages.replacement_of(original)
        def record_and_call(pg: Any, *args: Any, **kwargs: Any) -> Any:
            group = group_of(pg)
            if group is None:
                return original(pg, *args, **kwargs)
            before = group.number, group.chain
            with suppress(*_REJECTED):
                describe(pg, args, kwargs)
            try:
                return original(pg, *args, **kwargs)
            except Exception as error:
                if not _is_of_connection(error):
                    self._recorder.take_back(group, before)
                raise

        return record_and_call

    def watch_waits(self, spans: SpanWriter, c10d: Any) -> None:
        """Record how long Python code waits for collectives. Waits inside torch's C++ code have no spans."""
        wait, recorder = c10d.Work.wait, self._recorder

        @packages.replaces(c10d.Work, "wait")
        def wait_and_record(work: Any, *args: Any, **kwargs: Any) -> Any:
            began_s = monotonic()
            try:
                return wait(work, *args, **kwargs)
            finally:
                spans.put(SpanKind.COLLECTIVE, began_s, monotonic(), _PLACES.get(recorder.last_kind, -1))

    def _methods(self) -> dict[str, _Describe]:
        """Return functions that record calls of ``ProcessGroup`` methods, by each name that a torch release uses."""
        return {
            "allreduce": self._all_reduce,
            "allreduce_coalesced": self._all_reduce,
            "broadcast": partial(self._rooted, "broadcast", 0),
            "reduce": partial(self._rooted, "reduce", 0),
            "gather": partial(self._rooted, "gather", 1),
            "scatter": partial(self._rooted, "scatter", 0),
            "allgather": self._all_gather,
            "allgather_coalesced": partial(self._sized, "all_gather", 1, 1),
            "_allgather_base": partial(self._sized, "all_gather", 0, 1),
            "all_gather_single": partial(self._sized, "all_gather", 0, 1),
            "allgather_into_tensor_coalesced": partial(self._sized, "all_gather", 0, 1),
            "all_gather_single_coalesced": partial(self._sized, "all_gather", 0, 1),
            "reduce_scatter": self._reduce_scatter,
            "_reduce_scatter_base": partial(self._sized, "reduce_scatter", 1, 1),
            "reduce_scatter_single": partial(self._sized, "reduce_scatter", 1, 1),
            "reduce_scatter_tensor_coalesced": partial(self._sized, "reduce_scatter", 1, 1),
            "reduce_scatter_single_coalesced": partial(self._sized, "reduce_scatter", 1, 1),
            "alltoall_base": self._all_to_all_single,
            "all_to_all_single": self._all_to_all_single,
            "alltoall": self._all_to_all,
            "barrier": partial(self._barrier, "barrier"),
            "monitored_barrier": partial(self._barrier, "monitored_barrier"),
            "send": partial(self._transfer, "send"),
            "recv": partial(self._transfer, "recv"),
            "recv_anysource": partial(self._transfer, "recv"),
        }

    def _reduction(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return the name of the reduction, from the options or from a separate argument."""
        for argument in (*args[1:], *kwargs.values()):
            operation = getattr(argument, "reduceOp", argument)
            if type(operation).__name__ in ("ReduceOp", "RedOpType"):
                return self._reductions.get(hash(operation), "")
        return ""

    def _all_reduce(self, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, number, size = self._forms(args[0])
        self._note_reduction(args[0])
        self._recorder.record(pg, "all_reduce", form, number, size, self._reduction(args, kwargs))

    def _note_reduction(self, tensors: Any) -> None:
        if self.local_gradients.is_watched:
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                self.local_gradients.note_reduction(tensor)

    def _rooted(self, kind: str, shown: int, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a collective with a root. ``shown`` is the index of the argument with the same size on all ranks."""
        form, number, size = self._forms(args[shown])
        options = next(value for value in (*args[1:], *kwargs.values()) if hasattr(value, "rootRank"))
        reduction = self._reduction(args, kwargs) if kind == "reduce" else ""
        self._recorder.record(pg, kind, form, number, size, reduction, options.rootRank)

    def _sized(
        self, kind: str, compared: int, shown: int, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a collective. The tensors at index ``compared`` of its arguments have the same size on all ranks."""
        form, number, size = self._forms(args[shown])
        if compared != shown:
            size = self._forms(args[compared])[2]
        reduction = ""
        if kind == "reduce_scatter":
            self._note_reduction(args[shown])
            reduction = self._reduction(args, kwargs)
        self._recorder.record(pg, kind, form, number, size, reduction)

    def _all_gather(self, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Some backends gather parts of different sizes; the total is the same on all ranks.
        form, number, _ = self._forms(args[1])
        self._recorder.record(pg, "all_gather", form, number, self._forms(args[0][0])[2])

    def _reduce_scatter(self, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, number, size = self._forms(args[1][0])
        self._recorder.record(pg, "reduce_scatter", form, number, size, self._reduction(args, kwargs))

    def _all_to_all_single(self, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, number, size = self._forms(args[1])
        received, sent = args[2:4] if len(args) > 3 else ((), ())
        is_even = not received and not sent
        if not is_even:
            self._recorder.note_splits(pg, sent or args[1], received or args[0])
        self._recorder.record(pg, "all_to_all", form, number, size if is_even else UNCOUNTED)

    def _all_to_all(self, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form, number, _ = self._forms(args[1])
        self._recorder.record(pg, "all_to_all", form, number)

    def _barrier(self, kind: str, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder.record(pg, kind)

    def _transfer(self, kind: str, pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self._recorder.group_of(pg)
        form = self._recorder.form_of(args[0][0])
        *peers, tag = args[1:3]  # a receiver may accept any sender
        detail = f"tag {tag}" if tag else ""
        self._recorder.note(kind, next(self._transfers), group, form, peers[0] if peers else -1, detail)

    def _forms(self, tensors: Any) -> tuple[Form, int, int]:
        """Return the form of the first tensor, the number of tensors, and their total number of elements."""
        form_of = self._recorder.form_of
        if not isinstance(tensors, (list, tuple)):
            form = form_of(tensors)
            return form, 1, form[0]
        if not tensors:
            return NO_FORM, 0, 0
        form = form_of(tensors[0])
        number = len(tensors)
        return form, number, form[0] if number == 1 else sum(form_of(tensor)[0] for tensor in tensors)

    # --- DTensor -----------------------------------------------------------------------------------------------------

    def watch_functional(self, module: Any) -> None:
        """Record DTensor's calls. In newer releases of torch, functions with old names call their successors."""
        names = {"broadcast": "broadcast", "all_reduce": "all_reduce", "all_to_all_single": "all_to_all"}
        names |= {"all_reduce_coalesced": "all_reduce"}
        if hasattr(module, "all_gather_single"):
            names |= dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), "all_gather")
            names |= dict.fromkeys(
                ("reduce_scatter_single", "reduce_scatter_single_coalesced"), "reduce_scatter"
            )
        else:
            for ending in ("tensor", "tensor_autograd", "into_tensor_coalesced", "tensor_coalesced"):
                names |= {f"all_gather_{ending}": "all_gather", f"reduce_scatter_{ending}": "reduce_scatter"}
        for name, kind in names.items():
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, self._recording_functional(module, original, kind))

    def _recording_functional(
        self, module: Any, original: Callable[..., Any], kind: str
    ) -> Callable[..., Any]:
        places = {name: place for place, name in enumerate(inspect.signature(original).parameters)}
        resolve = getattr(module, "_resolve_group", None) or module._resolve_group_name
        torch = sys.modules["torch"]  # the module may be only partly imported at this point
        recorder = self._recorder

        def argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = places.get(name, len(args))
            return args[place] if place < len(args) else kwargs.get(name, "")

        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OpenGroup, tuple[int, int]] | None:
            pg = resolve(argument("group", args, kwargs), argument("tag", args, kwargs))
            if isinstance(pg, str):
                pg = sys.modules["torch.distributed.distributed_c10d"]._resolve_process_group(pg)
            group = recorder.group_of(pg)
            if group is None:
                return None
            before = group, (group.number, group.chain)
            form, number, size = self._forms(args[0])
            has_splits = kind == "all_to_all" and argument("input_split_sizes", args, kwargs)
            recorder.record(
                pg, kind, form, number, UNCOUNTED if has_splits else size,
                str(argument("reduceOp", args, kwargs)).upper(),
            )  # fmt: skip
            return before

        @packages.replacement_of(original)
        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or module._are_we_tracing():
                return original(*args, **kwargs)
            before = None
            with suppress(*_REJECTED):
                before = record(args, kwargs)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if before is not None and not _is_of_connection(error):
                    recorder.take_back(*before)
                raise

        return record_and_call

    # --- DistributedDataParallel -------------------------------------------------------------------------------------

    def watch_ddp(self, module: Any) -> None:
        """Record constructors, which compare models across ranks, and forward passes, which precede gradient
        exchanges.
        """
        cls = module.DistributedDataParallel
        construct, forward = cls.__init__, cls.forward
        signature = inspect.signature(construct)
        torch = sys.modules["torch"]
        is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
        recorder = self._recorder
        # Torch calls every module through one function, which calls either the wrapper's forward or one of the user's.
        find, write = recorder.notes_of(FORWARD, 1, compared=0)

        @packages.replaces(cls, "__init__")
        def record_and_construct(ddp: Any, *args: Any, **kwargs: Any) -> None:
            with suppress(Exception):  # invalid arguments, or an unusual module
                self._record_model(signature.bind(ddp, *args, **kwargs).arguments)
            construct(ddp, *args, **kwargs)
            self._wrapped.append(weakref.ref(ddp, self._wrapped.remove))
            ddp._nblaunch_model = f"model {next(self._models)}"

        @packages.replaces(cls, "forward")
        def record_and_forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                pg, group = ddp.process_group, recorder.last_group
                if group is None or group.reference() is not pg:
                    group = recorder.group_of(pg)
                is_synchronised = ddp.require_backward_grad_sync and is_grad_enabled()
                site = find((-1 if group is None else group.handle, ddp._nblaunch_model))
                write(site, 1.0 if is_synchronised else 0.0)
            if len(inputs) == 1 and not kwargs:  # most calls; the general form costs as much as recording
                return forward(ddp, inputs[0])
            return forward(ddp, *inputs, **kwargs)

        cls._nblaunch_model = ""  # each instance has its own number, in the order of construction

    def _record_model(self, arguments: dict[str, Any]) -> None:
        pg, mesh = arguments.get("process_group"), arguments.get("device_mesh")
        if pg is None:
            pg = mesh.get_group(0) if mesh is not None else sys.modules["torch.distributed"].group.WORLD
        module = arguments["module"]
        if not hasattr(module, "named_parameters"):
            return  # torch will reject it
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        dtypes = "/".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
        size = sum(parameter.numel() for parameter in parameters)
        detail = f"{len(parameters)} parameters with {size:,} elements"
        layout = ", ".join(str(list(parameter.shape)) for parameter in parameters)
        self._recorder.record(
            pg,
            "DistributedDataParallel",
            (size, dtypes, 0, (0, 0, 0, 0)),
            0,
            crc32(layout.encode()),
            detail=detail,
        )

    def watch_joins(self, module: Any) -> None:
        """Note that ranks may take different numbers of steps."""

        def note(join: Any) -> None:
            self._is_uneven = True

        packages.call_before(module.Join, "__init__", note)

    # --- backward and steps ------------------------------------------------------------------------------------------

    def watch_steps_and_backward(self, slot: Slot) -> None:
        """Record each backward pass, and each step of an optimizer whose parameters a process group keeps in sync.

        Hooks that report to the board call these functions, because each additional hook would cost as much as
        recording an entry.
        """
        recorder, owners, gradients = self._recorder, self._owners, self.local_gradients
        find_backward, write_backward = recorder.notes_of(BACKWARD, 2, compared=-1)
        find_step, write_step = recorder.notes_of(STEP, 2, compared=-1)
        last: _Owner = _no_owner, None, ""

        def record_backward() -> None:
            if recorder.is_active:
                write_backward(find_backward((-1, "")), 0.0)

        def record_step(optimizer: Any) -> None:
            nonlocal last
            if not recorder.is_active:
                return
            try:
                if gradients.is_watched:
                    gradients.note_step(optimizer)
                reference, group, share = last
                if reference() is not optimizer:
                    last = owners.get(id(optimizer)) or self._find_owner(optimizer)
                    _, group, share = last
                if group is None:
                    return
                rate = optimizer.param_groups[0].get("lr")
                if type(rate) is not float:
                    rate = float(rate) if isinstance(rate, (int, float)) else -1.0
                write_step(find_step((group.handle, UNEVEN if self._is_uneven else share)), rate)
            except Exception:  # for example, a user's optimizer without support for weak references; skip it
                return

        slot.record_step, slot.record_backward = record_step, record_backward
        slot.local_gradients = gradients

    def _find_owner(self, optimizer: Any) -> _Owner:
        key, owners = id(optimizer), self._owners
        owner = owners[key] = (
            weakref.ref(optimizer, lambda _: owners.pop(key, None)),
            *self._owner_of(optimizer),
        )
        return owner

    def _owner_of(self, optimizer: Any) -> tuple[OpenGroup | None, str]:
        """Return the group that syncs an optimizer's parameters (None if unknown), and a string that identifies them.

        Ranks may update different parameters, with different learning rates.
        """
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not stepped:
            return None, ""
        if hasattr(stepped[0], "device_mesh"):
            return self._recorder.group_of(stepped[0].device_mesh.get_group(0)), ""
        keys = set(map(id, stepped))
        for reference in self._wrapped:
            ddp = reference()
            names = [] if ddp is None else [name for name, p in ddp.named_parameters() if id(p) in keys]
            if ddp is not None and names:
                return self._recorder.group_of(ddp.process_group), f"{crc32(' '.join(names).encode()):x}"
        return None, ""
