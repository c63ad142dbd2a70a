# Written by `make stubs` from nblaunch/compat/names.py.
import os
from collections.abc import Callable, Mapping
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
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: EngineName='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[False]=False, sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[False]=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, session: 'Session | None'=None) -> _T:
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
        num_processes: number of workers; None = ``NBLAUNCH_NUM_PROCESSES``, or one per device (per usable core on a
            CPU-only machine).
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; default of an ``Accelerator()`` in the function.
        use_port: TCP port of the rendezvous; None = a free one, so that two notebooks never collide; with several
            machines 29500.
        master_addr: address on which the rendezvous listens: of machine 0, as the others reach it.
        node_rank: rank of this machine, from 0. Run the same call on every machine, each with its own.
        num_nodes: number of machines; ``"min:max"`` where fewer will do, with ``rdzv_backend="c10d"``.
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
            ``num_nodes`` above 1.
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
        rdzv_timeout_s: seconds in which several machines must find each other; None = 600.
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
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: EngineName='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[True], sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[False]=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, session: 'Session | None'=None) -> list[_T]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: EngineName='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[False]=False, sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[True], detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, session: 'Session | None'=None) -> Job[_T]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: EngineName='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: Literal[True], sync_weights: bool=True, sync_optimizers: bool=False, background: Literal[True], detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, session: 'Session | None'=None) -> Job[list[_T]]:
    ...

@overload
def notebook_launcher(function: Callable[..., _T], args: tuple[Any, ...]=(), num_processes: int | None=None, mixed_precision: MixedPrecision='no', use_port: str | int | None=None, master_addr: str='127.0.0.1', node_rank: int=0, num_nodes: int | str=1, rdzv_backend: RendezvousBackend='static', rdzv_endpoint: str='', rdzv_conf: Mapping[str, Any] | None=None, rdzv_id: str='none', max_restarts: int=0, monitor_interval: float=0.1, log_line_prefix_template: str | None=None, *, backend: BackendName | str='auto', engine: EngineName='auto', start_method: StartMethod='auto', strategy: LaunchStrategy='auto', return_all: bool=False, sync_weights: bool=True, sync_optimizers: bool=False, background: bool=False, detach: bool=False, dashboard: DashboardKind='auto', threads_per_process: int | None=None, interrupt_grace_s: float=5.0, hang_timeout_s: float | None=300.0, on_hang: HangPolicy='report', post_mortem: bool=False, log_dir: str | None=None, rdzv_timeout_s: float | None=None, session: 'Session | None'=None) -> Any:
    ...

@overload
def launch(function: Callable[..., _T], args: tuple[Any, ...]=(), *, config_file: str | os.PathLike[str] | None=None, return_all: Literal[False]=False, sync_weights: bool=True, background: Literal[False]=False, **settings: Any) -> _T:
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

