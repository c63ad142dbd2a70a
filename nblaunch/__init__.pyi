# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.debugging import (
    debug as debug,
)
from nblaunch.detached import (
    attach as attach,
    jobs as jobs,
)
from nblaunch.errors import (
    CheckpointError as CheckpointError,
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
    launch as launch,
    notebook_launcher as notebook_launcher,
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
