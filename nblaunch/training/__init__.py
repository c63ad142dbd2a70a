"""What a training function calls: the :class:`Accelerator` and its relatives.

It meets the launcher only in ``nblaunch.context``, so that the same function runs in a notebook, under ``torchrun``
and in plain ``python``. One process, from the outside in:

    context.ProcessContext       what the launcher gave the process: ranks, backend, progress board
      .training: SharedState     shared_state.py    what Accelerators, loaders and optimizers of the process share
        .process: JoinedProcess  joining.py          its rank and device, once it has joined the process group;
                                                     barriers and waiting for other ranks
        .accumulation            accumulation.py     the window of micro-steps that was entered last, of whichever
                                                     Accelerator, and the loaders being read
    PartialState and others      state.py            what users read of the shared state; they hold nothing themselves
    ProcessMethods               process_methods.py  what the Accelerator and these states do with the joined process

The :class:`Accelerator`, and what it is built of:

    accelerator.py   the methods that users call: a façade
    properties.py    its properties and its parts
    per_process.py   an Accelerator that was made in a notebook cell builds its parts anew in each worker
    options.py       the dataclasses that are passed to its constructor
    arguments.py     the constructor's arguments, sorted, checked and completed
    parallelism.py   how the ranks are divided: the ParallelismConfig and its device mesh; sequences sharded over ranks
    precision.py     number formats: around the forward, and for backward, clipping and step; fp16's gradient scaler;
                     fp8: layers that torchao converts
    strategies/      how a model is trained on several ranks: replicated, sharded
    gradients.py     backward, the block of a micro-step; gradients in their true size, for clipping
    uneven_inputs.py ranks with unequal numbers of batches
    collectives/     values of all ranks; random states
    checkpoints/     saved states and models
    trusted_types.py which classes files of checkpoints may name
    tracking/        metrics and trackers
    checks/          errors of a loop that raise nothing
    utilities/       what scripts import beside the Accelerator

The way of objects through ``prepare``:

    prepare.py: Preparer     strategies/ (on_prepare: a look at all objects of the call), then loaders and models as
                             they come, then optimizers, then schedulers
      loaders                data/prepare.py (samplers that shuffle get a generator; with ``use_seedable_sampler``, one
                             of data/samplers.py takes their place)
                             ──> data/sharding.py (which batches are the rank's)
                             ──> data/loader.py (reads them; each epoch begins with rank 0's generators on all ranks)
                             where rank 0 reads for all: data/prepare.py ──> data/dispatcher.py
      models                 models.py (without_parallel_wrappers, stays_in_place)
                             ──> precision.py (layers; forward, unless FSDP2's MixedPrecisionPolicy does that:
                                 casts_models)
                             ──> strategies/ (place: to the device; FSDP2 and DeepSpeed move it as they set it up)
                             ──> strategies/ (setup_module: rank 0's weights; wrap or shard)
                             ──> strategies/ (compile: DeepSpeed's own), else models.py (compile_model)
      optimizers             strategies/ ──> models.py (Replacements.hand_to: the parameters that prepare has put in
                                 the place of others; in Accelerate: fsdp2_switch_optimizer_parameters)
                             ──> optimizer.py: steps only where a window of its Accelerator ends (Preparer.accumulation)
      schedulers             strategies/ ──> optimizer.py: steps with its optimizer

The way of a loss through ``backward``: gradients.py ──> strategies/ (divided by the micro-steps of an optimizer step)
──> precision.py (scaled, for fp16; ``loss.backward()``, in which hooks reduce gradients)
──> ``nblaunch.progress`` (shown)

What dashboards show as a step is a batch that data/loader.py has handed out, or an item of ``accelerator.progress``.
Steps of optimizers, any optimizer's, are counted by a hook that the worker has set on torch
(``nblaunch.worker.libraries``).
"""
