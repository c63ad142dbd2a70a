"""Sends the value of a function that has returned, then the trained weights and optimizer states.

    value ──> Returned ──> state of one module ──> StateSent ──> state of the next ...
    (if the user interrupted the function: ──> Interrupted ──> the states in the same way)

Once every rank has sent ``Returned``, the job has its result. If sending the weights fails, for example
because memory runs out or ``state_dict()`` raises an error, this result is unaffected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from nblaunch import formatting
from nblaunch.events import Interrupted, Returned, StateSent, ValueLocation
from nblaunch.topology import Topology
from nblaunch.weights import (
    is_fsdp1_module,
    is_fsdp_module,
    is_sharded,
    quantised_entries,
    shape_mismatches,
    shards_to_send,
    trained_samples,
    without_wrappers_inside,
)
from nblaunch.wire.argument_paths import ArgPath, is_scheduler, modules_at, modules_in, optimizers_at
from nblaunch.wire.originals import Originals
from nblaunch.wire.outbox import Outbox
from nblaunch.worker.optimizer_steps import steps

_MAX_NAMED = 3  # tensors named in one line
_ABSENT = (
    "its arguments do not contain this object; perhaps a __getstate__ left it out of the pickled arguments"
)


class Delivery:
    """Sends a worker's results to its launcher.

    Create this object before the function is called, because the function may replace modules in containers. The
    object finds the modules and records where their tensors are.

    If every rank holds the whole module, one rank sends its weights: the first of each machine, or the first of the
    job if one process collects the weights of all machines. If ranks hold shards, each rank sends its own.

    Args:
        topology: topology of the worker.
        outbox_fd: empty memory file for the results.
        returns_value: whether the launcher wants this rank's return value.
        args: arguments of the function.
        originals: where the launcher can still read the current tensors of modules; None = all tensors are sent.
        wanted_modules: as in ``wire/assignment.py``.
        wanted_optimizers: as in ``wire/assignment.py``.
        is_main: as in ``wire/assignment.py``; None means the first rank of each machine.
    """

    def __init__(
        self,
        topology: Topology,
        outbox_fd: int,
        returns_value: bool,
        args: Sequence[Any],
        originals: Originals | None,
        wanted_modules: Sequence[ArgPath],
        wanted_optimizers: Sequence[ArgPath] = (),
        is_main: bool | None = None,
    ) -> None:
        self._topology = topology
        self._rank = topology.rank
        self._is_main = topology.local_rank == 0 if is_main is None else is_main
        self._outbox_fd = outbox_fd
        self._returns_value = returns_value
        self._args = args
        self._modules = modules_at(args, wanted_modules)
        self._originals = originals
        self._num_steps_before = steps.num_done
        self._optimizers = optimizers_at(args, wanted_optimizers)
        paths = self._modules.keys() | self._optimizers.keys()
        self._absent = [path for path in (*wanted_modules, *wanted_optimizers) if path not in paths]
        if originals is not None and self._is_main:
            originals.remember(self._modules)
        self._samples = {} if topology.world_size == 1 else self._sampled()

    @property
    def modules(self) -> Mapping[ArgPath, Any]:
        """The modules whose weights the launcher collects, by argument path."""
        return self._modules

    @cached_property
    def _outbox(self) -> Outbox:
        return Outbox(self._outbox_fd)

    def results(self, value: Any, *, left_by_exit: bool) -> Iterator[Returned | StateSent]:
        """Write the value, then the states one by one; yield the event that reports each.

        Raises:
            Exception: the value could not be written.
        """
        is_wanted = self._returns_value and not left_by_exit and value is not None
        location = self._outbox.put_value(value) if is_wanted else ValueLocation()
        sends = self._sends()
        present = self._sampled() if self._samples else {}
        changed = tuple(path for path in present if present[path] != self._samples[path])
        yield Returned(
            self._rank, value_location=location, left_by_exit=left_by_exit, sends=sends, changed=changed
        )
        yield from self._put_states(sends)

    def _sampled(self) -> dict[ArgPath, list[float]]:
        return {path: trained_samples(module) for path, module in self._modules.items()}

    def interrupted_states(self) -> Iterator[Interrupted | StateSent]:
        """Yield the event that reports the progress of this rank's function, then write the states as
        :meth:`results` does.
        """
        sends = () if steps.is_cut else self._sends()
        num_steps = steps.num_done - self._num_steps_before
        yield Interrupted(self._rank, step=num_steps, is_cut=steps.is_cut, sends=sends)
        yield from self._put_states(sends)

    def _sends(self) -> tuple[ArgPath, ...]:
        self._modules.update(replacements(self._args, self._modules))
        # If every rank holds the whole module, one rank is enough.
        sends = tuple(self._modules) if self._is_main or self._holds_shards() else ()
        return (*sends, *self._optimizers, *self._absent) if self._is_main else sends

    def _put_states(self, paths: Sequence[ArgPath]) -> Iterator[StateSent]:
        """Write the states one by one; for each, yield where it is or why it is missing."""
        in_shards = bool(paths) and self._holds_shards()
        for path in paths:
            yield self._put_state(path, in_shards)

    def _put_state(self, path: ArgPath, in_shards: bool) -> StateSent:
        """Write the state of a module or optimizer; return where it is or why it is missing."""
        if path in self._absent:
            return StateSent(self._rank, path=path, error=_ABSENT)
        try:
            if path in self._optimizers:
                at, end, lost = self._put_optimizer_state(path, in_shards)
            else:
                at, end, lost = self._put_weights(path, in_shards)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return StateSent(self._rank, path=path, error=text)
        return StateSent(self._rank, path=path, at=at, end=end, lost=lost)

    def _holds_shards(self) -> bool:
        """Return whether ranks hold shards, created by a strategy or by the user's own ``fully_shard``."""
        optimizers = (optimizer for optimizer in self._optimizers.values() if not is_scheduler(optimizer))
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        modules = self._modules.values()
        parameters = [parameter for group in groups for parameter in group["params"]]
        parameters += [parameter for module in modules for parameter in module.parameters()]
        return (
            any(is_sharded(parameter) or hasattr(parameter, "ds_id") for parameter in parameters)
            # The parameters of an FSDP module may currently be gathered.
            or any(is_fsdp_module(part) for module in modules for part in module.modules())
        )

    def _put_weights(self, path: ArgPath, in_shards: bool) -> tuple[int, int, str]:
        """Write weights; return where they begin, where they end, and which parts could not be sent.

        Raises:
            RuntimeError: ``state_dict()`` would wait for the other ranks.
        """
        module = without_wrappers_inside(self._modules[path])
        if any(map(is_fsdp1_module, module.modules())):
            raise RuntimeError(
                "FSDP version 1 sharded the module and can gather it only on all ranks together. Use version 2, "
                "fully_shard"
            )
        state = dict(
            shards_to_send(module.state_dict(keep_vars=True), self._topology, self._is_main)
            if in_shards
            else module.state_dict()
        )
        bare = {name for name, tensor in state.items() if getattr(tensor, "is_meta", False)}
        if len(bare) == len(state):
            return -1, -1, ""  # it has no weights, because it is still on the meta device
        left_out = set(quantised_entries(module, state))
        for name in bare | left_out:
            del state[name]
        # Shards are new tensors that can't be compared with the originals, so all are sent.
        tests = self._originals.equality_tests(path, state) if self._originals and not in_shards else {}
        at, end, lost = self._outbox.put_state(path, state, tests)
        return at, end, "; ".join(filter(None, [lost, _describe_bare(sorted(bare - left_out))]))

    def _put_optimizer_state(self, path: ArgPath, in_shards: bool) -> tuple[int, int, str]:
        """Write the state of an optimizer or scheduler, which is the same on all ranks. Return what
        :meth:`_put_weights` returns.

        Raises:
            RuntimeError: every rank has a shard of the state.
        """
        if in_shards and not is_scheduler(self._optimizers[path]):
            raise RuntimeError(
                "each rank holds a shard of it. Save it inside the function, for example with accelerator.save_state()"
            )
        return self._outbox.put_state(path, self._optimizers[path].state_dict(), {})


def _describe_bare(names: Sequence[str]) -> str:
    """Describe tensors without values, whose layers are offloaded or were never materialised."""
    if not names:
        return ""
    return f"{formatting.first(names, _MAX_NAMED)} (on the meta device, which holds no values)"


def replacements(args: Sequence[Any], modules: Mapping[ArgPath, Any]) -> dict[ArgPath, Any]:
    """Return the modules in ``args`` that have replaced ``modules``, by path.

    In many libraries, each call to ``fit`` puts a new module into an object. If the new module has the same class and
    shapes as the previous one, the kernel's module gets its weights.
    """
    if not any(isinstance(path, str) for path in modules):
        return {}
    present = modules_in(args)
    return {
        path: present[path]
        for path, module in modules.items()
        if path in present and _replaces(present[path], module)
    }


def _replaces(module: Any, other: Any) -> bool:
    """Return whether a module is another one of the same class, with tensors of the same shapes."""
    if module is other or type(module) is not type(other) or any(part is other for part in module.modules()):
        return False
    state, others = module.state_dict(), other.state_dict()
    return state.keys() == others.keys() and not any(shape_mismatches(other, others, state))
