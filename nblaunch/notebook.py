"""``notebook_launcher``, ``debug_launcher`` and ``launch``: arguments in, a job run, its result back.

    arguments ──> LaunchSpec ──> LaunchPlan ──> Job ──> its result, or in the background the Job

Annotations are not postponed here: ``help(notebook_launcher)`` would show each of them in quotes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nblaunch import attached_debugger, debugging, env
from nblaunch import dashboard as dashboards
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
    engine: EngineName = "auto",
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
    """Run ``function(*args)`` on every device of this machine, one process each, and return rank 0's value.

    Workers are forked from this process: they have the function, what it closes over and the modules in ``args``
    without a pickle, in memory that is shared until one side writes to it (copy-on-write). Trained weights are sent
    back at the end, and loaded into these modules. Where a fork is not possible (CUDA is in use in the kernel),
    workers start through a clean process instead, and nothing needs a restart. Inside the function,
    ``Accelerator()``, plain ``torch.distributed.init_process_group()`` and other frameworks find their rank and each
    other by themselves.

    Example::

        model = build_model()

        def train(model):
            accelerator = Accelerator()
            ...  # a plain PyTorch loop
            return {"accuracy": accuracy}

        result = notebook_launcher(train, (model,))  # on all devices; model has the trained weights now

    Args:
        function: the training function. It runs in every worker; its return value must be picklable.
        args: its positional arguments, a tuple. Pass the model here, as ``(model,)``: it is held in memory once, and
            its trained weights come back. Several models are several arguments, or lie in lists, tuples, dicts or
            dataclasses. Keyword arguments: pass ``functools.partial(function, name=value)`` as the function.
        num_processes: number of workers, of all machines together where an engine starts them; None =
            ``NBLAUNCH_NUM_PROCESSES``, or one per device (per usable core on a CPU-only machine).
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; default of an ``Accelerator()`` in the function.
        use_port: TCP port of the rendezvous; None = a free one, so that two notebooks never collide; with several
            machines 29500.
        master_addr: address on which the rendezvous listens: of machine 0, as the others reach it.
        node_rank: rank of this machine, from 0. Run the same call on every machine, each with its own.
        num_nodes: number of machines; ``"min:max"`` where fewer will do, with ``rdzv_backend="c10d"`` or an engine.
        rdzv_backend: how several machines meet: ``"static"``: a fixed set, at ``master_addr:use_port``; ``"c10d"``: as
            they come and go, at ``rdzv_endpoint``, which one of them hosts. One machine needs none of it: without
            an address, both mean the same there.
        rdzv_endpoint: that address, as ``"host:port"``, the same on every machine.
        rdzv_conf: further settings by torch's names: ``timeout``, ``join_timeout``, ``last_call_timeout``,
            ``keep_alive_interval`` (seconds of silence after which a machine is named, 5),
            ``keep_alive_max_attempt`` (how many such intervals until it is given up, 3), ``is_host``.
        rdzv_id: name of the job at the rendezvous.
        max_restarts: how often all workers are started again after a failure; with several machines also after one of
            them was lost, once it is back. With ``background=True`` later attempts never fork the kernel, which may be
            running other code by then: they load a copy of the call as it was at the launch, which is pickled for that
            and kept in memory until the job ends.
        monitor_interval: accepted for compatibility; workers are watched by events, not by polling.
        log_line_prefix_template: label of printed lines, with ``${rank}``, ``${local_rank}`` and ``${role_name}``;
            None = ``[rank]``.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"xpu"``, ``"mps"``, ``"xla"`` or ``"torch_tpu"``.
        engine: ``"auto"`` or ``"local"``: worker processes; ``"inline"``: in this process, as the only rank, for pdb,
            which refuses what only processes can do (``background``, ``start_method``, ``max_restarts``, ...);
            ``"elastic"``: worker processes that join those of other machines, which ``"auto"`` means with
            ``num_nodes`` above 1. From this one process on ``num_nodes`` machines, with ``num_processes`` in all:
            ``"ray"``: nodes of a Ray cluster; ``"ssh"``: ``hosts``; ``"slurm"``: nodes of the allocation in which this
            process runs; ``"processes"``: this machine stands for all of them, to try that out.
        start_method: ``"auto"``, ``"fork"``, ``"forkserver"`` or ``"spawn"``.
        strategy: ``"auto"``: data parallel, one process per device. ``"spmd"``: one process drives all XLA devices,
            with batches sharded over them by the compiler, and weights, too, with ``Accelerator(fsdp_plugin=...)``.
            (Strategies for models are arguments of the ``Accelerator``: ``fsdp_plugin``, ``deepspeed_plugin``.)
        return_all: return the list of all ranks' values.
        sync_weights: load the trained weights of the modules in ``args`` back into these very modules.
        sync_optimizers: load what the optimizers in ``args`` and torch's schedulers of them have become (moments,
            steps, learning rates) back into these very objects, so that the next launch goes on where this one ended.
            For data parallel training; sharded states are saved by ``accelerator.save_state``.
        background: return a :class:`Job` as soon as the workers run and leave the kernel free; the job's ``result()``
            waits. An interrupt before that ends the job.
        detach: with ``background=True``, let the job outlive this process: its own process and workers run apart from
            it, and :func:`nblaunch.attach` gives the :class:`Job` again in any kernel, script or shell
            (:func:`nblaunch.jobs` lists all). The call is pickled for that. Trained weights are kept for
            :meth:`Job.load_weights`, and loaded into no module by themselves.
        dashboard: ``"widgets"``: live controls in a notebook, which a table replaces at the end; ``"html"``: a table
            that is updated; ``"text"``: lines; ``"none"``: nothing, and what workers print is in the logs only.
            ``"auto"``: widgets where a user can see them, else HTML in a notebook, else text.
        threads_per_process: CPU threads of each worker; None = ``OMP_NUM_THREADS``, or usable cores / workers.
        interrupt_grace_s: seconds for ``finally`` blocks after an interrupt, before workers are killed. The modules in
            ``args`` then have the weights of the last optimizer step that had ended, or a note says why not. A function
            that catches the KeyboardInterrupt and returns on every rank has lost nothing: the cell ends with the
            interrupt, but trained weights are loaded, and ``last_job().result()``, or ``session.result()``, returns the
            value. With several machines this holds for each on which every rank returns.
        hang_timeout_s: seconds without progress after which the position of every rank is shown; None = never. Progress
            is counted: steps of optimizers, batches of prepared loaders, collectives and backward of the
            ``Accelerator``, ``accelerator.log``, ``accelerator.progress`` and bars of tqdm that advance. Output and
            processor time are no progress. A collective that is waited in for so long while no rank makes progress, or
            one line that a rank stays in since its last step, is a hang; other work without progress is reported as
            what may be one.
        on_hang: ``"report"`` that, or ``"stop"`` the job as well, where it is a hang for certain.
        post_mortem: when a rank raises, raise its exception as ever, but keep the workers where they are, the others
            in a collective maybe: :func:`nblaunch.debug` then opens pdb at the failure, ``last_job().inspect("name")``
            and ``last_job().compare()`` show variables of every rank. They end with the next launch,
            ``last_job().release()``, or after 30 minutes.
        log_dir: folder for logs; None = ``NBLAUNCH_LOG_DIR``, or a private folder in the temporary folder.
        rdzv_timeout_s: seconds in which several machines must find each other, or an engine's nodes must be ready;
            None = 600.
        hosts: with ``engine="ssh"``, the machines as ``ssh`` names them; they need no password, and have Python and
            nblaunch.
        resources_per_node: with ``engine="ray"``, what a node must have free, as ``{"CPU": 8, "GPU": 4}``; None = a
            core, and a GPU where the cluster has any, for each rank.
        runtime_env: with ``engine="ray"``, the environment of the nodes, as ``ray.init`` takes it.
        session: run on the workers of a :class:`Session` instead of new ones. Settings of their start are those of
            the session; others are refused.

    Returns:
        The return value of rank 0, its tensors on the CPU; the list of all ranks' with ``return_all``; a
        :class:`Job` with ``background``. On each of several machines: of its own first rank, or of its own ranks.

    Raises:
        TypeError, ValueError, RuntimeError: an argument can't be used; raised before any process starts.
        LaunchError: the workers could not be started.
        JobHung: the job made no progress, with ``on_hang="stop"``; says where every rank was.
        WorkerDied: a worker ended without raising an exception; says how, and what to do.
        ResultError: the return value can't be pickled; its ``partial`` holds what could.
        KeyboardInterrupt: the launch was interrupted, before any rank failed.
        BaseException: whatever ``function`` raised first, with its original type.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames():
        specs = [LaunchSpec(
            function=function, args=args, num_processes=num_processes, mixed_precision=mixed_precision,
            backend=backend, engine=engine, start_method=start_method, is_spmd=wants_spmd(strategy),
            master_addr=master_addr, master_port=parse_port(use_port), node_rank=node_rank, num_nodes=num_nodes,
            rdzv_backend=rdzv_backend, rdzv_endpoint=rdzv_endpoint, rdzv_conf=rdzv_conf, rdzv_id=rdzv_id,
            rdzv_timeout_s=rdzv_timeout_s, max_restarts=max_restarts,
            hosts=hosts, resources_per_node=resources_per_node, runtime_env=runtime_env,
            log_line_prefix_template=log_line_prefix_template, return_all=return_all, sync_weights=sync_weights,
            sync_optimizers=sync_optimizers, post_mortem=post_mortem, threads_per_process=threads_per_process,
            interrupt_grace_s=interrupt_grace_s, hang_timeout_s=hang_timeout_s, on_hang=on_hang,
            log_dir=log_dir, is_detached=_checked_detach(detach, background, session),
        )]  # fmt: skip
        # IPython keeps tracebacks and so this frame: it may not hold function, args and spec, which pop() gives away.
        del function, args
        if session is not None:
            from nblaunch.session.session import run_in_session

            return run_in_session(session, specs.pop(), background=background, dashboard=dashboard)
        return run_spec(specs.pop(), background=background, dashboard=dashboard)


def _checked_detach(detach: bool, background: bool, session: object) -> bool:
    check_flag("detach", detach)
    if detach and session is not None:
        raise ValueError(
            "detach=True can't be combined with session=: the workers of a session end with this kernel"
        )
    if detach and not background:
        raise ValueError(
            "detach=True is for jobs in the background: pass background=True as well; job.result() waits for the end"
        )
    return bool(detach)


def debug_launcher(function: Callable[..., T], args: tuple[Any, ...] = (), num_processes: int = 2) -> T:
    """Run ``function(*args)`` in a few CPU processes without mixed precision, to try out distributed code.

    Args:
        function: as for :func:`notebook_launcher`.
        args: its arguments, a tuple.
        num_processes: how many.

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
    """Run ``function(*args)`` on every device from a script, one process each, and return rank 0's value.

    The same as :func:`nblaunch.notebook_launcher`, with the settings and the configuration file of ``nblaunch launch``:
    an argument beats the file, the file beats the defaults.

    Example::

        def train(model): ...

        if __name__ == "__main__":
            result = nblaunch.launch(train, (model,), num_processes=4)

    Args:
        function: the training function. It runs in every worker; its return value must be picklable.
        args: its positional arguments, a tuple; a model among them is held in memory once.
        config_file: written by ``nblaunch config`` or ``accelerate config``; None = the default one, if it exists.
        return_all: return the list of all ranks' values.
        sync_weights: load the trained weights of the modules in ``args`` back into these very modules.
        background: return a :class:`Job` as soon as the workers run; its ``result()`` waits.
        **settings: any option of ``nblaunch launch`` by its name, as ``num_processes=4, mixed_precision="bf16"``.

    Returns:
        The return value of rank 0; the list of all ranks' with ``return_all``; a :class:`Job` with ``background``.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting, or the file, has a value that it can't have; raised before any process starts.
        LaunchError: the workers could not be started.
        BaseException: whatever ``function`` raised first, with its original type.
    """
    __tracebackhide__ = True
    from nblaunch.config.launching import device_choice, resolved_settings, spec_of
    from nblaunch.config.resolving import unknown
    from nblaunch.config.settings import SETTINGS, UNUSED

    with HiddenLauncherFrames():
        settings = {name: value for name, value in settings.items() if name not in UNUSED}
        for name in settings:
            if name not in SETTINGS:
                raise TypeError(f"launch() got an unexpected argument: {unknown(name, SETTINGS)}")
        resolved = resolved_settings(config_file, settings)
        spec = spec_of(resolved, function, args, return_all=return_all, sync_weights=sync_weights)
        shown = "auto" if resolved["dashboard"] == "text" else resolved["dashboard"]
        with env.patched(device_choice(resolved)):
            return run_spec(spec, background=background, dashboard=shown)


def run_spec(spec: LaunchSpec, *, background: bool = False, dashboard: str = "auto") -> Any:
    """Launch ``spec`` and return its result, or with ``background`` the :class:`Job` as soon as its workers run.

    An interrupt ends the job, with ``background`` only one that comes before its workers run. KeyboardInterrupt is
    raised when it has ended; where a rank had failed before, what that one raised.

    Raises:
        BaseException: as :func:`notebook_launcher` describes.
    """
    __tracebackhide__ = True
    check_flag("background", background)
    job: Job | None = None
    # A debugger would look at every line of the launcher. It goes on where the function runs in this process.
    untraced = nullcontext if spec.engine == "inline" else attached_debugger.untraced
    try:
        with untraced(), signal_handlers.held_back():
            job = _prepared_job(spec, background=background, dashboard=dashboard)
        del spec  # or a traceback, which IPython keeps, would keep the arguments by this frame
        if isinstance(job, JobRunner):
            with untraced():
                job.run_in_background() if background else job.run()
    except BaseException as error:
        if isinstance(job, JobRunner):
            job.end_unwatched(error)
        elif job is not None:  # a detached one, and the handler of a signal has raised
            job.cancel()
        raise
    if background:
        job.raise_if_not_started()
        return job
    return job.result()


def _prepared_job(spec: LaunchSpec, *, background: bool, dashboard: str) -> Job:
    """Return the job of a spec: one that is detached runs, any other has not started."""
    __tracebackhide__ = True
    descriptors.occupy_standard_ones()
    can_break = not (spec.is_elastic or spec.is_on_nodes or spec.is_detached)
    if can_break and debugging.takes_breakpoints(background):
        spec = replace(spec, has_breakpoints=True)
    plan = plan_launch(spec, background=background)
    listeners = dashboards.choose(dashboard, background=background)
    try:
        job: Job
        if spec.is_detached:
            from nblaunch.detached.job_process import start

            job = start(spec, plan, listeners)
        else:
            job = make_runner(spec, plan, listeners)
            release_kept_failures()  # no earlier: a refused launch takes them only where they may have the devices
    except BaseException as error:
        dashboards.close_refused(listeners, error)
        raise
    dashboards.connect(listeners, job)
    remember(job)
    return job


def make_runner(spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> JobRunner:
    """Return the runner of a job that has not started; what several machines need is imported only for them."""
    if spec.is_on_nodes:
        from nblaunch.engines.runner import EngineRunner

        return EngineRunner(spec, plan, listeners)
    if not spec.is_elastic:
        return JobRunner(spec, plan, listeners, on_prompts=debugging.on_prompts)
    from nblaunch.nodes.link import NodeRunner

    return NodeRunner(spec, plan, listeners)
