"""``notebook_launcher``, ``debug_launcher`` and ``launch``: turn arguments into a job, run it, and return its result.

    arguments ──> LaunchSpec ──> LaunchPlan ──> Job ──> its result, or with ``background=True`` the Job

Annotations are evaluated in this module, because ``help(notebook_launcher)`` would otherwise show them in quotes.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from nblaunch import dashboard as dashboards
from nblaunch import debugging, env, other_debuggers
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.host import descriptors, signal_handlers
from nblaunch.launcher.debug_client import release_kept_failures
from nblaunch.launcher.job import Job, Listener, remember
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import (
    BackendName,
    DashboardKind,
    EngineName,
    HangPolicy,
    LaunchSpec,
    LaunchStrategy,
    MixedPrecision,
    RendezvousBackend,
    StartMethod,
    check_flag,
    parse_port,
    wants_spmd,
)

if TYPE_CHECKING:
    from nblaunch.engines.kept_nodes import Nodes
    from nblaunch.session.session import Session

T = TypeVar("T")


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: MixedPrecision = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int | str = 1,
    rdzv_backend: RendezvousBackend = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    backend: BackendName | str = "auto",
    engine: "EngineName | Nodes" = "auto",
    start_method: StartMethod = "auto",
    strategy: LaunchStrategy = "auto",
    return_all: bool = False,
    sync_weights: bool = True,
    sync_optimizers: bool = False,
    background: bool = False,
    detach: bool = False,
    dashboard: DashboardKind = "auto",
    threads_per_process: int | None = None,
    interrupt_grace_s: float = 5.0,
    hang_timeout_s: float | None = 300.0,
    on_hang: HangPolicy = "report",
    post_mortem: bool = False,
    log_dir: str | None = None,
    rdzv_timeout_s: float | None = None,
    hosts: Sequence[str] = (),
    resources_per_node: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    session: "Session | None" = None,
) -> Any:
    """Run ``function(*args)`` on every device of this machine, in one process per device; return rank 0's value.

    nblaunch forks the workers from this process. They inherit the function, its closure and the modules in ``args``
    without pickling; memory is copied only when one side writes to it (copy-on-write). At the end, nblaunch loads the
    trained weights into the modules in ``args``. If a fork is unsafe, for example because the kernel uses CUDA, the
    workers start from a clean process, and the kernel needs no restart. Inside the function, ``Accelerator()``,
    plain ``torch.distributed.init_process_group()`` and other frameworks detect the ranks.

    Example::

        model = build_model()

        def train(model):
            accelerator = Accelerator()
            ...  # a plain PyTorch loop
            return {"accuracy": accuracy}

        result = notebook_launcher(train, (model,))  # on all devices; model then has the trained weights

    Args:
        function: the training function. It runs in every worker, and its return value must be picklable.
        args: its positional arguments, a tuple. Pass the model here, as ``(model,)``, so that it is in memory only
            once and its trained weights come back. Pass several models as separate arguments, or in lists, tuples,
            dicts or dataclasses. For keyword arguments, pass ``functools.partial(function, name=value)`` as the
            function.
        num_processes: number of workers; with an engine for several machines, the total on all machines. None =
            ``NBLAUNCH_NUM_PROCESSES``, or one per device (per usable core on a machine without GPUs or TPUs).
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; the default of ``Accelerator()`` in the
            function.
        use_port: TCP port of the rendezvous. None = a free port, or 29500 with several machines.
        master_addr: address of the rendezvous, at which the other machines reach machine 0.
        node_rank: rank of this machine, counted from 0. Run the same call on every machine, each with its own rank.
        num_nodes: number of machines, or ``"min:max"`` with ``rdzv_backend="c10d"`` or an engine.
        rdzv_backend: how machines find each other. ``"static"``: a fixed set of machines meets at
            ``master_addr:use_port``. ``"c10d"``: machines can join and leave; they meet at ``rdzv_endpoint``. On one
            machine, both are the same.
        rdzv_endpoint: address of the c10d rendezvous as ``"host:port"``. Every machine must name the same host.
        rdzv_conf: further settings with torch's names: ``timeout``, ``join_timeout``, ``last_call_timeout``,
            ``keep_alive_interval`` (seconds without a heartbeat after which a machine is reported, 5),
            ``keep_alive_max_attempt`` (number of such intervals after which it is lost, 3), ``is_host``.
        rdzv_id: name of the job at the rendezvous.
        max_restarts: how many times to restart all workers after a failure or, with several machines, when a lost
            machine returns. With ``background=True``, restarts never fork the kernel, which may be running other code.
            Instead, the new workers load a pickled copy of the call, which stays in memory until the job ends.
        monitor_interval: accepted for compatibility; the launcher waits for events instead of polling.
        log_line_prefix_template: label of printed lines, with ``${rank}``, ``${local_rank}`` and ``${role_name}``.
            None = ``[rank]``.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"xpu"``, ``"mps"``, ``"xla"`` or ``"torch_tpu"``.
        engine: ``"auto"`` or ``"local"``: worker processes. ``"inline"``: this process, as the only rank, for pdb;
            arguments that need worker processes (``background``, ``start_method``, ``max_restarts``, ...) raise an
            error. ``"elastic"``: worker processes that join the workers of other machines; ``"auto"`` chooses it if
            ``num_nodes`` is greater than 1. These engines start workers on ``num_nodes`` machines from this process:
            ``"ray"`` on nodes of a Ray cluster, ``"ssh"`` on ``hosts``, ``"slurm"`` on the nodes of the allocation in
            which this process runs, and ``"processes"`` on this machine, for tests. A :class:`Nodes` object keeps such
            an engine's machines between launches.
        start_method: ``"auto"``, ``"fork"``, ``"forkserver"`` or ``"spawn"``.
        strategy: ``"auto"``: data parallel, one process per device. ``"spmd"``: one process drives all XLA devices;
            the compiler shards batches across them and, with ``Accelerator(fsdp_plugin=...)``, also weights. Strategies
            for models are arguments of the ``Accelerator``: ``fsdp_plugin``, ``deepspeed_plugin``.
        return_all: return a list of the values of all ranks.
        sync_weights: load the trained weights into the modules in ``args``.
        sync_optimizers: load the states of the optimizers in ``args`` and of torch's schedulers (moments, steps,
            learning rates) into these objects, so that the next launch continues from them. For data parallel training
            only; save sharded states with ``accelerator.save_state``.
        background: return a :class:`Job` as soon as the workers are running, and leave the kernel free;
            ``job.result()`` waits. An interrupt before the call returns ends the job.
        detach: with ``background=True``, let the job outlive this process. It then runs in its own process, and
            :func:`nblaunch.attach` returns its :class:`Job` in any kernel, script or shell (:func:`nblaunch.jobs` lists
            all jobs). The call is pickled. Trained weights stay with the job until :meth:`Job.load_weights` loads them.
        dashboard: ``"widgets"``: live widgets in a notebook, replaced by a table at the end. ``"html"``: a table that
            is updated. ``"text"``: lines. ``"none"``: nothing; output goes only to the logs. ``"auto"``: widgets if a
            user can see them, else HTML in a notebook, else text.
        threads_per_process: CPU threads of each worker. None = ``OMP_NUM_THREADS``, or usable cores / workers.
        interrupt_grace_s: seconds that ``finally`` blocks have between an interrupt and the kill. The modules in
            ``args`` then have the weights from the last completed optimizer step, or a note says why not. If a function
            catches the KeyboardInterrupt and returns on every rank, the trained weights are loaded and
            ``last_job().result()`` or ``session.result()`` returns the value, although the cell raises the interrupt.
            With several machines, this applies to each machine on which every rank returns.
        hang_timeout_s: seconds without progress before the position of every rank is shown. None = never. These count
            as progress: optimizer steps, batches of prepared loaders, collectives and ``backward`` of the
            ``Accelerator``, ``accelerator.log``, ``accelerator.progress`` and tqdm bars that advance. Output and
            processor time do not. A job hangs if no rank makes progress while at least one is waiting in a collective,
            or has stayed on the same line since its last step. Other work without progress is reported as a possible
            hang.
        on_hang: ``"report"``: report a hang. ``"stop"``: also stop the job.
        post_mortem: keep the workers at their current lines if a rank raises an exception; the cell raises it
            immediately. :func:`nblaunch.debug` then opens pdb at the failure, and ``last_job().inspect("name")`` and
            ``last_job().compare()`` show variables of every rank. The workers end with the next launch, with
            ``last_job().release()``, or after 30 minutes.
        log_dir: folder for logs. None = ``NBLAUNCH_LOG_DIR``, or a private folder in the temporary folder.
        rdzv_timeout_s: how long machines may take to find each other or become ready, in seconds. None = 600.
        hosts: with ``engine="ssh"``, the machines, by the names that ``ssh`` accepts. They must accept connections
            without a password, and have Python and nblaunch.
        resources_per_node: with ``engine="ray"``, free resources that a node must have, such as ``{"CPU": 8, "GPU":
            4}``. None = one core per rank, and one GPU per rank if the cluster has GPUs.
        runtime_env: with ``engine="ray"``, the environment of the nodes, as in ``ray.init``.
        session: run on the workers of a :class:`Session` instead of new ones. Arguments that control how the workers
            start must then have their default value or the session's value.

    Returns:
        The return value of rank 0, with its tensors on the CPU. With ``return_all``, the list of the values of all
        ranks; with ``background``, a :class:`Job`. With several machines, the call on each machine returns the value
        of that machine's first rank, or the list of the values of all its ranks.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is invalid; raised before any process starts.
        LaunchError: the workers could not be started.
        JobHung: the job made no progress, and ``on_hang="stop"`` is set; the message gives the position of every rank.
        WorkerDied: a worker ended without raising an exception; the message says how, and what to do.
        ResultError: the return value can't be pickled; the error's ``partial`` has the parts that can.
        KeyboardInterrupt: the launch was interrupted before any rank failed.
        BaseException: the first exception that ``function`` raised, with its original type.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames():
        specs = [LaunchSpec(
            function=function, args=args, num_processes=num_processes, mixed_precision=mixed_precision,
            backend=backend, start_method=start_method, is_spmd=wants_spmd(strategy),
            **_machines(engine, detach, num_nodes=num_nodes, hosts=hosts, resources_per_node=resources_per_node,
                        runtime_env=runtime_env),
            master_addr=master_addr, master_port=parse_port(use_port), node_rank=node_rank, rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint, rdzv_conf=rdzv_conf, rdzv_id=rdzv_id, rdzv_timeout_s=rdzv_timeout_s,
            max_restarts=max_restarts, log_line_prefix_template=log_line_prefix_template, return_all=return_all,
            sync_weights=sync_weights, sync_optimizers=sync_optimizers, post_mortem=post_mortem,
            threads_per_process=threads_per_process, interrupt_grace_s=interrupt_grace_s, hang_timeout_s=hang_timeout_s,
            on_hang=on_hang, log_dir=log_dir, is_detached=_checked_detach(detach, background, session),
        )]  # fmt: skip
        # IPython keeps tracebacks, and with them this frame, so remove function, args and spec from it.
        del function, args
        if session is not None:
            from nblaunch.session.session import run_in_session

            return run_in_session(session, specs.pop(), background=background, dashboard=dashboard)
        return run_spec(specs.pop(), background=background, dashboard=dashboard)


def _machines(engine: "EngineName | Nodes", detach: bool, **given: Any) -> dict[str, Any]:
    """Return the settings of a launch that say where it runs: ``given``, or the machines of :class:`nblaunch.Nodes`.

    Raises:
        ValueError: ``engine`` has machines that differ from ``given``, or the job must outlive this process.
    """
    kept_nodes: Any = sys.modules.get("nblaunch.engines.kept_nodes")
    if kept_nodes is None or not isinstance(engine, kept_nodes.Nodes):
        return {"engine": engine, **given}
    if detach:
        raise ValueError(
            f"detach=True can't be combined with engine={engine!r}: the job would outlive this process, but its nodes "
            "would not"
        )
    return engine.settings(given)


def _checked_detach(detach: bool, background: bool, session: object) -> bool:
    check_flag("detach", detach)
    if detach and session is not None:
        raise ValueError(
            "detach=True can't be combined with session=: the workers of a session end with this kernel"
        )
    if detach and not background:
        raise ValueError(
            "detach=True is for jobs in the background: also pass background=True; job.result() waits for the end"
        )
    return bool(detach)


def debug_launcher(function: Callable[..., T], args: tuple[Any, ...] = (), num_processes: int = 2) -> T:
    """Run ``function(*args)`` in a few CPU processes without mixed precision, to test distributed code.

    Args:
        function: as in :func:`notebook_launcher`.
        args: its positional arguments, a tuple.
        num_processes: number of workers.

    Returns:
        The return value of rank 0.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames():
        specs = [LaunchSpec(function=function, args=args, num_processes=num_processes, backend="cpu")]
        del function, args
        value: T = run_spec(specs.pop())
        return value


def launch(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    config_file: str | os.PathLike[str] | None = None,
    return_all: bool = False,
    sync_weights: bool = True,
    background: bool = False,
    **settings: Any,
) -> Any:
    """Run ``function(*args)`` on every device from a script, in one process per device; return rank 0's value.

    Works like :func:`nblaunch.notebook_launcher`, with the settings and the configuration file of ``nblaunch launch``.
    Arguments override the file, and the file overrides the defaults.

    Example::

        def train(model): ...

        if __name__ == "__main__":
            result = nblaunch.launch(train, (model,), num_processes=4)

    Args:
        function: the training function. It runs in every worker, and its return value must be picklable.
        args: its positional arguments, a tuple. A model among them is in memory only once.
        config_file: file written by ``nblaunch config`` or ``accelerate config``. None = the default file, if it
            exists.
        return_all: return a list of the values of all ranks.
        sync_weights: load the trained weights into the modules in ``args``.
        background: return a :class:`Job` as soon as the workers are running; its ``result()`` waits.
        **settings: any option of ``nblaunch launch`` by name, such as ``num_processes=4, mixed_precision="bf16"``.

    Returns:
        The return value of rank 0. With ``return_all``, a list of the values of all ranks; with ``background``, a
        :class:`Job`.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting or the file has an invalid value; raised before any process starts.
        LaunchError: the workers could not be started.
        BaseException: the first exception that ``function`` raised, with its original type.
    """
    __tracebackhide__ = True
    from nblaunch.config.launching import device_choice, resolved_settings, spec_of
    from nblaunch.config.settings import SETTINGS, UNUSED, instead_of

    with HiddenLauncherFrames():
        for name in settings:
            if name not in SETTINGS and name not in UNUSED:
                raise TypeError(f"launch() got an unexpected keyword argument {name!r}{instead_of(name)}")
        resolved = resolved_settings(config_file, settings)
        spec = spec_of(resolved, function, args, return_all=return_all, sync_weights=sync_weights)
        shown = "auto" if resolved["dashboard"] == "text" else resolved["dashboard"]
        with env.patched(device_choice(resolved)):
            return run_spec(spec, background=background, dashboard=shown)


def run_spec(spec: LaunchSpec, *, background: bool = False, dashboard: str = "auto") -> Any:
    """Launch ``spec`` and return its result, or with ``background`` the :class:`Job` as soon as its workers are
    running. An interrupt ends the job; with ``background``, it does so only before the workers are running. This
    function then raises KeyboardInterrupt, or the exception of a rank that had failed before.

    Raises:
        BaseException: as :func:`notebook_launcher` describes.
    """
    __tracebackhide__ = True
    check_flag("background", background)
    job: Job | None = None
    # A debugger would trace every line of the launcher. With engine="inline", it stays on for the function.
    untraced = nullcontext if spec.engine == "inline" else other_debuggers.untraced
    try:
        with untraced(), signal_handlers.held_back():
            job = _prepared_job(spec, background=background, dashboard=dashboard)
        del spec  # otherwise a traceback that IPython keeps would keep the arguments alive through this frame
        if isinstance(job, JobRunner):
            with untraced():
                job.run_in_background() if background else job.run()
    except BaseException as error:
        if isinstance(job, JobRunner):
            job.end_unwatched(error)
        elif job is not None:  # a detached job whose start a signal handler interrupted
            job.cancel()
        raise
    if background:
        job.raise_if_not_started()
        return job
    return job.result()


def _prepared_job(spec: LaunchSpec, *, background: bool, dashboard: str) -> Job:
    """Return the job for a spec. A detached job is already running; any other job has not started yet."""
    __tracebackhide__ = True
    descriptors.occupy_standard_ones()
    spec = debugging.with_breakpoints(spec, background=background)
    plan = plan_launch(spec, background=background)
    listeners = dashboards.choose(dashboard, background=background)
    try:
        job: Job
        if spec.is_detached:
            from nblaunch.detached.job_process import start

            job = start(spec, plan, listeners)
        else:
            job = make_runner(spec, plan, listeners)
            # Release kept failures only now, so that they stay available if the launch is rejected.
            release_kept_failures()
    except BaseException as error:
        dashboards.close_rejected(listeners, error)
        raise
    dashboards.connect(listeners, job)
    remember(job)
    return job


def make_runner(spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> JobRunner:
    """Return a job's runner without starting it. Code for several machines is imported only if needed."""
    if spec.is_on_nodes:
        from nblaunch.engines.runner import EngineRunner

        return EngineRunner(spec, plan, listeners)
    if not spec.is_elastic:
        return JobRunner(spec, plan, listeners, on_prompts=debugging.on_prompts)
    from nblaunch.nodes.link import NodeRunner

    return NodeRunner(spec, plan, listeners)
