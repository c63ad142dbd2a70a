"""The API for training functions: the :class:`Accelerator` and related classes.

This package uses the launcher only through ``nblaunch.context``, so the same function runs in a notebook, under
``torchrun`` and in plain ``python``. The objects in a process, from the outside in:

    context.ProcessContext       the launcher's information for this process: ranks, backend, progress board
      .training: SharedState     shared_state.py     shared by all Accelerators, loaders and optimizers in the process
        .process: JoinedProcess  joining.py          rank and device, after joining the process group; barriers, and
                                                     waiting for other ranks
        .accumulation            accumulation.py     the last accumulation window that an Accelerator entered, and the
                                                     loaders being read
    PartialState and others      state.py            the user's views of the shared state, without data of their own
    ProcessMethods               process_methods.py  methods of the Accelerator and these states on the joined process

The :class:`Accelerator` and its parts:

    accelerator.py   the methods that users call: a façade
    properties.py    its properties and its parts
    per_process.py   rebuilds, in each worker, the parts of an Accelerator from a notebook cell
    options.py       the dataclasses for its constructor
    arguments.py     sorts, checks and completes the constructor's arguments
    parallelism.py   divides the ranks: ParallelismConfig and its device mesh; sequences sharded over ranks
    precision.py     number formats for forward, backward, clipping and step; fp16's gradient scaler; torchao's fp8
                     layers
    strategies/      trains a model on several ranks: replicated or sharded
    gradients.py     backward, micro-steps, unscaling and clipping
    uneven_inputs.py ranks with unequal numbers of batches
    collectives/     gathers and reduces values across ranks; random states
    checkpoints/     saves and loads states and models
    trusted_types.py the classes that checkpoint files may name
    tracking.py      metrics that the training function logs: from ``log`` to the trackers and to the launcher
    trackers.py      experiment trackers
    checks/          finds errors that raise no exception in training loops
    utilities/       functions that scripts import in addition to the Accelerator

``prepare`` passes objects through these modules:

    prepare.py: Preparer     strategies/ (on_prepare: checks all objects of the call), then loaders and models in the
                             order of the call, then optimizers, then schedulers
      loaders                data/prepare.py (samplers that shuffle get a generator; with ``use_seedable_sampler``, one
                             of data/samplers.py takes their place)
                             ──> data/sharding.py (which batches are the rank's)
                             ──> data/loader.py (reads them; each epoch begins with rank 0's generators on all ranks)
                             if rank 0 reads for all: data/prepare.py ──> data/dispatcher.py
      models                 models.py (without_parallel_wrappers, stays_in_place)
                             ──> precision.py (layers; forward, unless FSDP2's MixedPrecisionPolicy does that:
                                 casts_models)
                             ──> strategies/ (place: to the device; FSDP2 and DeepSpeed move it as they set it up)
                             ──> strategies/ (setup_module: rank 0's weights; wrap or shard)
                             ──> strategies/ (compile, for DeepSpeed), else models.py (compile_model)
      optimizers             strategies/ ──> models.py (Replacements.hand_to: gives them the new parameters; in
                                 Accelerate: fsdp2_switch_optimizer_parameters)
                             ──> optimizer.py: steps only at the end of an accumulation window
      schedulers             strategies/ ──> optimizer.py: steps with its optimizer

``backward`` passes a loss through these modules: gradients.py ──> strategies/ (divides it by the number of micro-steps
per optimizer step) ──> precision.py (scales it for fp16, and calls ``loss.backward()``, in which hooks reduce
gradients) ──> ``nblaunch.progress`` (shows it)

On dashboards, a step is a batch that data/loader.py has yielded, or an item from ``accelerator.progress``. A hook that
the worker installs in torch counts the steps of all optimizers (``nblaunch.worker.optimizer_steps``).
"""
