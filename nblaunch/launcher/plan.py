"""LaunchPlan: decides, before any worker starts, how to launch, or explains why a launch is impossible.

It inspects the machine without creating a device context, because workers can't be forked from a kernel that has one. A
backend may try a fork (``backends/first_use.py``). If devices are unavailable, planning ends the workers that are kept
for the debugger, because they may hold the devices.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from nblaunch import backends, context, env, formatting, other_debuggers, packages
from nblaunch.backends.base import Backend
from nblaunch.backends.cpu import usable_cores
from nblaunch.errors import LaunchError
from nblaunch.launcher import copied_variables, debug_client, store
from nblaunch.spec import LaunchSpec, uses
from nblaunch.user_code import cell_name, is_user_file, used_by
from nblaunch.wire.argument_paths import ArgPath, modules_in, optimizers_in
from nblaunch.wire.assignment import FunctionCall
from nblaunch.worker.inheritance import connections, threads

_IS_MACOS = sys.platform == "darwin"


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch.

    Args:
        backend: device family of the workers.
        num_processes: number of workers.
        start_method: ``"fork"``, ``"forkserver"``, ``"spawn"``, or ``"inline"`` for no workers; for a detached job, the
            requested method until the job's process decides.
        reason: why this method was chosen, as the end of a sentence.
        num_threads: CPU threads of each worker.
        modules: modules in the arguments whose weights come back, by argument path.
        optimizers: optimizers in the arguments whose states come back, and their schedulers, by argument path.
        fallback: why workers are not forked although the user chose no other start method, as a sentence; empty
            otherwise.
        starts_later: whether workers may start after the launching call has returned: restarts in the background, and
            starts that wait for other machines or happen on them.
        warnings: possible problems, one sentence each.
    """

    backend: Backend
    num_processes: int
    start_method: str
    reason: str
    num_threads: int
    modules: Mapping[ArgPath, Any] = field(repr=False)
    optimizers: Mapping[ArgPath, Any] = field(default_factory=dict, repr=False)
    fallback: str = ""
    starts_later: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """All fields except backend, modules and optimizers, for other processes."""
        objects = ("backend", "modules", "optimizers")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in objects}


def plan_launch(spec: LaunchSpec, *, background: bool = False) -> LaunchPlan:
    """Decide everything that ``spec`` leaves open, and reject launches that can't work on this machine.

    Args:
        spec: what to launch.
        background: whether the launching call returns while the job is running.

    Raises:
        ValueError: more processes than devices, a precision that the device does not support, an argument that can't
            work in another process, or an invalid environment variable of :mod:`nblaunch.env`.
        RuntimeError: the caller is a worker, or the backend can't be used on this machine.
        LaunchError: the devices or the requested start method can't be used from this kernel.
    """
    if context.is_worker():
        raise RuntimeError(
            "a worker requested a launch; call notebook_launcher in the notebook, not in the function that it runs"
        )
    env.check()
    if spec.engine == "inline":
        _reject_beside_inline(spec, background)
    if spec.is_on_nodes:
        return _plan_on_nodes(spec)
    # Workers of a detached job start in the job process, which makes its own plan; this process may be unsafe to
    # fork.
    starts_here = not (spec.is_detached and background)
    starts_later = starts_here and _starts_later(spec, background)
    if starts_later and background and spec.start_method == "fork":
        raise ValueError(_LATER_FORK)
    backend = _usable_backend(spec)
    num_processes = _num_processes(spec, backend)
    start = (
        _start_of(spec, backend)
        if starts_here
        else _Start(spec.start_method, "the job's own process decides")
    )
    is_inline = start.method == "inline"
    modules, optimizers = modules_in(spec.args), _synced_optimizers(spec)
    return LaunchPlan(
        backend=backend,
        num_processes=num_processes,
        start_method=start.method,
        reason=start.reason,
        num_threads=_num_threads(spec, num_processes),
        modules=modules if spec.sync_weights and not is_inline else {},
        optimizers={} if is_inline else optimizers,
        fallback=start.fallback,
        starts_later=starts_later,
        warnings=(
            *spec.notes,
            *_overlooked(backend),
            *backend.launch_notes(num_processes),
            *(() if is_inline else _foreign_accelerators(spec)),
            *(() if is_inline else filter(None, [other_debuggers.note()])),
            *copied_variables.warnings_about(spec, num_processes, start.method),
        ),
    )


def _usable_backend(spec: LaunchSpec) -> Backend:
    """Return the backend that the launch uses.

    Raises:
        LaunchError: it can't be used from this kernel.
        ValueError: its devices do not support the precision.
    """
    backend = backends.choose(spec.backend)
    problem = backend.launch_problem()
    if problem is not None and debug_client.latest_kept_failure() is not None:
        # Workers that are kept for the debugger may hold the devices.
        debug_client.release_kept_failures()
        problem = backend.launch_problem()
    if problem is not None:
        raise LaunchError(f"backend={backend.name!r} can't be used now: {problem}")
    backend.check_precision(spec.mixed_precision)
    return backend


def _plan_on_nodes(spec: LaunchSpec) -> LaunchPlan:
    """Return this process's part of the plan for a launch on other machines, each of which makes its own plan.

    The backend, and the number of processes if it is not set, are placeholders until the nodes have replied.
    """
    return LaunchPlan(
        backend=backends.find("cpu"),
        num_processes=spec.num_processes or spec.max_nodes,
        start_method=spec.start_method,
        reason="each node decides",
        num_threads=spec.threads_per_process or 1,
        modules=modules_in(spec.args) if spec.sync_weights else {},
        optimizers=_synced_optimizers(spec),
        starts_later=True,
        warnings=tuple(_foreign_accelerators(spec)),
    )


def _synced_optimizers(spec: LaunchSpec) -> Mapping[ArgPath, Any]:
    """Return the optimizers and schedulers whose states the workers send back.

    Raises:
        ValueError: ``sync_optimizers=True`` but there is no optimizer.
    """
    if not spec.sync_optimizers:
        return {}
    optimizers = optimizers_in(spec.args)  # schedulers come with their optimizers, never alone
    if not optimizers:
        raise ValueError(
            "sync_optimizers=True, but there is no optimizer in args; build the optimizer in the notebook and pass "
            "it with its model: args=(model, optimizer)"
        )
    return optimizers


def replan_start_method(plan: LaunchPlan, spec: LaunchSpec) -> LaunchPlan:
    """Decide again how workers start, before a restart: a fork may no longer be safe.

    Raises:
        LaunchError: the requested start method can't be used now.
    """
    start = _start_of(spec, plan.backend)
    return replace(plan, start_method=start.method, reason=start.reason, fallback=start.fallback)


_LATER_FORK = (
    "start_method='fork' can't be combined with background=True and max_restarts, or with several machines: a fork "
    "while the kernel runs other code can freeze the kernel. Leave start_method out; nblaunch then forks where it "
    "is safe and uses a forkserver elsewhere."
)


def _starts_later(spec: LaunchSpec, background: bool) -> bool:
    in_thread = background or threading.current_thread() is not threading.main_thread()
    return in_thread and spec.engine != "inline" and (spec.is_elastic or spec.max_restarts > 0)


def _reject_beside_inline(spec: LaunchSpec, background: bool) -> None:
    """Reject settings that only worker processes can honour, instead of ignoring them."""
    asked: dict[str, Any] = {"background": True} if background else {}
    for field_, use in uses():
        value = getattr(spec, field_.name)
        if use.needs_workers and value is not None and value != field_.default:
            asked[field_.name] = value
    if asked:
        raise ValueError(
            "engine='inline' runs the function in the kernel, so "
            f"{formatting.joined([f'{name}={value!r}' for name, value in asked.items()])} can't be used: leave "
            f"{'it' if len(asked) == 1 else 'them'} out, or leave out engine='inline'"
        )


def _num_processes(spec: LaunchSpec, backend: Backend) -> int:
    if spec.is_spmd:
        return _one_process(spec, backend)
    if spec.engine == "inline":
        if spec.num_processes not in (None, 1):
            raise ValueError(
                f"num_processes={spec.num_processes}: engine='inline' runs the function in this process; valid values "
                "are 1 and None"
            )
        return 1
    wanted = spec.num_processes or env.read("NBLAUNCH_NUM_PROCESSES")
    if not wanted:
        wanted = backend.device_count()
    elif not backend.is_oversubscribable:
        _check_devices(spec, wanted, backend)
    problem = backend.count_problem(wanted)
    if problem is not None:
        raise ValueError(f"num_processes={wanted}: {problem}")
    return wanted


def _check_devices(spec: LaunchSpec, num_processes: int, backend: Backend) -> None:
    available = backend.device_count()
    if num_processes <= available or (backend.shares_devices and spec.backend == backend.name):
        return
    sharing = (
        f"; backend={backend.name!r} lets several processes share a device, for experiments"
        if backend.shares_devices
        else ""
    )
    raise ValueError(
        f"num_processes={num_processes}, but this machine has {formatting.count(available, backend.device_noun)} "
        f"for backend={backend.name!r}: valid values are 1 to {available}, or None for all{sharing}"
    )


def _one_process(spec: LaunchSpec, backend: Backend) -> int:
    if backend.spmd_env() is None:
        raise ValueError(
            f"strategy='spmd' needs XLA devices (backend='xla'), but this launch uses {backend.name}; "
            "strategy='auto' runs one process per device"
        )
    if spec.num_processes not in (None, 1):
        raise ValueError(
            f"num_processes={spec.num_processes}: with strategy='spmd', one process drives all devices; valid values "
            "are 1 and None"
        )
    return 1


class _Start(NamedTuple):
    """The choice of a start method: the method, the reason for it, and the plan's sentence about an unusual choice."""

    method: str
    reason: str
    fallback: str = ""


def _start_of(spec: LaunchSpec, backend: Backend) -> _Start:
    """Decide how workers start.

    Raises:
        LaunchError: the user requested a fork, which is not possible here.
    """
    if spec.engine == "inline":
        return _Start("inline", "as requested, the function runs in the kernel")
    hazard = find_fork_hazard(backend, (spec.function, spec.args))
    # A forkserver also forks, which fails on macOS even from a clean process.
    clean_method, source = ("spawn", "fresh interpreters") if _IS_MACOS else ("forkserver", "a forkserver")
    if spec.start_method == "fork" and hazard is not None:
        raise LaunchError(
            f"start_method='fork' is not possible here: {hazard}. With start_method='auto' the workers start from "
            f"{source}, and the kernel needs no restart."
        )
    if spec.start_method != "auto":
        return _Start(spec.start_method, "as requested")
    if hazard is not None:
        reason = f"fork is not possible here: {hazard}"
        fallback = f"workers start from {source}: {reason}; the kernel needs no restart"
        return _Start(clean_method, reason, "" if _IS_MACOS else fallback)
    clean_reason = backend.clean_start_reason()
    if clean_reason is not None:
        return _Start("forkserver", clean_reason)
    return _Start("fork", "the workers share the model with the kernel; nothing is pickled")


def _overlooked(chosen: Backend) -> tuple[str, ...]:
    """Return a sentence for each device that stays idle because something is missing."""
    others = (
        backend
        for backend in backends.discover().values()
        if backend is not chosen and not (backend.drives and backend.drives == chosen.drives)
    )
    return tuple(text for backend in others if (text := backend.overlooked()) is not None)


def _num_threads(spec: LaunchSpec, num_processes: int) -> int:
    """Return the requested number of threads, or each worker's share of the cores."""
    return spec.threads_per_process or env.read("OMP_NUM_THREADS") or max(1, usable_cores() // num_processes)


# --- a Hugging Face Accelerator from the notebook ------------------------------------------------- A worker that uses
# it rebuilds its states (wire/accelerate_states.py), but objects that the Accelerator prepared in the notebook are for
# one process, so ranks would silently train separately. (nblaunch's own Accelerator detects this itself.)

_HAS_PREPARED = (
    "an accelerate.Accelerator that prepared objects in the notebook for one process, so the ranks would train "
    "separately. Call prepare only inside the function; free_memory() in the notebook drops the prepared objects"
)


def _foreign_accelerators(spec: LaunchSpec) -> list[str]:
    """Return a sentence for each Accelerator that the function uses without receiving it as an argument.

    Raises:
        ValueError: an argument is such an Accelerator.
    """
    for position, arg in enumerate(spec.args):
        if _has_prepared(arg):
            raise ValueError(f"args[{position}] is {_HAS_PREPARED}")
    return [
        f"{spec.function_name} uses {name} from the notebook, {_HAS_PREPARED}"
        for name, value in used_by(spec.function)
        if _has_prepared(value)
    ]


def _has_prepared(value: Any) -> bool:
    """Return whether ``value`` is an Accelerator from Hugging Face Accelerate that has prepared objects."""
    return packages.is_subclass(type(value), "accelerate.accelerator.Accelerator") and any(
        getattr(value, name, None) for name in ("_models", "_optimizers", "_schedulers", "_dataloaders")
    )


# --- whether workers can be forked ------------------------------------------------------------------------------------

# A fork copies the memory of all threads, but only the calling thread runs in the child. In a worker, whatever other
# threads were doing never finishes: a lock that a thread held stays locked, and a pool waits for threads that do not
# exist.
#
# The backend knows whether the device survives a fork (``Backend.fork_hazard``, ``backends/first_use.py``), and
# ``worker/inheritance/threads.py`` knows which libraries do not.


def find_fork_hazard(backend: Backend, call: FunctionCall) -> str | None:
    """Return the reason why workers can't be forked from this thread, as the end of a sentence; None if they can.

    Args:
        backend: device family of the workers.
        call: the function and its arguments.
    """
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if _IS_MACOS:
        return "Apple's system libraries do not survive a fork"
    if threading.current_thread() is not threading.main_thread():
        return (
            "the launch comes from a thread other than the main thread, and a fork would copy locks that "
            "the main thread holds"
        )
    if store.is_any_store_running():
        return (
            "another job of this process is running, and a fork could copy its store in the middle of a "
            "change"
        )
    hazard = backend.fork_hazard()
    if hazard is not None:
        return hazard + _first_device_use(backend)
    if connections.has_ray():
        return (
            "this process is connected to a Ray cluster, and a forked worker that calls Ray would end both processes; "
            "workers connect to the cluster themselves"
        )
    return threads.find_hazard(call)


def _first_device_use(backend: Backend) -> str:
    """Return the line of the user's own code that first used the device in this process, if it was seen."""
    frames = [frame for frame in backend.first_use() if is_user_file(frame[0])]
    if not frames:
        return ""
    filename, number, _ = frames[0]
    source = linecache.getline(filename, number).strip()
    return f"; the device was first used in {cell_name(filename)}, line {number}" + (
        f": `{source:.80}`" if source else ""
    )
