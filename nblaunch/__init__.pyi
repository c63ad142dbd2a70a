# Written by `make stubs` from nblaunch/compat.py.
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload
from nblaunch.spec import (
    BackendName,
    DashboardKind,
    EngineName,
    HangPolicy,
    LaunchStrategy,
    MixedPrecision,
    RendezvousBackend,
    StartMethod,
)
from nblaunch.debugging import (
    debug as debug,
)
from nblaunch.detached import (
    attach as attach,
    jobs as jobs,
)
from nblaunch.engines.kept_nodes import (
    Nodes as Nodes,
)
from nblaunch.errors import (
    CheckpointError as CheckpointError,
    CollectiveMismatch as CollectiveMismatch,
    DistributedOperationException as DistributedOperationException,
    JobCancelled as JobCancelled,
    JobHung as JobHung,
    JobLost as JobLost,
    LaunchError as LaunchError,
    NblaunchError as NblaunchError,
    NodeLost as NodeLost,
    PayloadError as PayloadError,
    ResultError as ResultError,
    WorkerDied as WorkerDied,
    WorkerError as WorkerError,
    WorkerFailed as WorkerFailed,
)
from nblaunch.launcher.job import (
    Job as Job,
    last_job as last_job,
)
from nblaunch.notebook import (
    debug_launcher as debug_launcher,
)
from nblaunch.session.session import (
    Session as Session,
)
from nblaunch.training.accelerator import (
    Accelerator as Accelerator,
)
from nblaunch.training.checkpoints.load_weights import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from nblaunch.training.collectives.rng import (
    set_seed as set_seed,
    synchronize_rng_states as synchronize_rng_states,
)
from nblaunch.training.data.resuming import (
    skip_first_batches as skip_first_batches,
)
from nblaunch.training.joining import (
    one_at_a_time as one_at_a_time,
)
from nblaunch.training.options import (
    AutocastKwargs as AutocastKwargs,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
)
from nblaunch.training.parallelism import (
    ParallelismConfig as ParallelismConfig,
)
from nblaunch.training.state import (
    AcceleratorState as AcceleratorState,
    DistributedType as DistributedType,
    GradientState as GradientState,
    PartialState as PartialState,
)
from nblaunch.training.strategies.deepspeed.strategy import (
    DeepSpeedPlugin as DeepSpeedPlugin,
)
from nblaunch.training.strategies.fsdp2.strategy import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from nblaunch.training.utilities.local_sgd import (
    LocalSGD as LocalSGD,
)
from nblaunch.training.utilities.memory import (
    find_executable_batch_size as find_executable_batch_size,
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
)

__version__: str

def load_ipython_extension(shell: object) -> None: ...

_T = TypeVar("_T")

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: 'EngineName | Nodes'='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[False]=False, sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[False]=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, hosts: Sequence[str]=(), resources_per_node: Mapping[str, float] | None=None, runtime_env: Mapping[str, Any] | None=None, session: 'Session | None'=None) -> _T:
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
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: 'EngineName | Nodes'='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[True], sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[False]=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, hosts: Sequence[str]=(), resources_per_node: Mapping[str, float] | None=None, runtime_env: Mapping[str, Any] | None=None, session: 'Session | None'=None) -> list[_T]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: 'EngineName | Nodes'='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[False]=False, sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[True], detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, hosts: Sequence[str]=(), resources_per_node: Mapping[str, float] | None=None, runtime_env: Mapping[str, Any] | None=None, session: 'Session | None'=None) -> Job[_T]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: 'EngineName | Nodes'='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[True], sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[True], detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, hosts: Sequence[str]=(), resources_per_node: Mapping[str, float] | None=None, runtime_env: Mapping[str, Any] | None=None, session: 'Session | None'=None) -> Job[list[_T]]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: 'EngineName | Nodes'='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: bool=False, sync_weights: bool=True, sync_optimizers: bool=False, background: bool=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, hosts: Sequence[str]=(), resources_per_node: Mapping[str, float] | None=None, runtime_env: Mapping[str, Any] | None=None, session: 'Session | None'=None) -> Any:
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: Literal[False]=False, sync_weights: bool=True, background: Literal[False]=False, **settings: Any) -> _T:
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
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: Literal[True], sync_weights: bool=True, background: Literal[False]=False, **settings: Any) -> list[_T]:
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: Literal[False]=False, sync_weights: bool=True, background: Literal[True], **settings: Any) -> Job[_T]:
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: Literal[True], sync_weights: bool=True, background: Literal[True], **settings: Any) -> Job[list[_T]]:
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: bool=False, sync_weights: bool=True, background: bool=False, **settings: Any) -> Any:
    ...

