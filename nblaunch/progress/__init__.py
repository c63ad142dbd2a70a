"""Reports a rank's training on the progress board, whichever library does the training.

    Accelerator, its loaders ──────────────────────┐
    plain loops: DataLoader, backward, optimizer ──┼──> Reports ──> slot of the board ──> launcher ──> dashboards
    Trainer, Lightning, fastai: number of epochs ──┘

board_reports.py   the reports of this process: loops, losses, busy time, device memory
planned_epochs.py  how many epochs the user's ``for`` loops will run
plain_loops.py     training loops without nblaunch's Accelerator, observed by hooks on torch
loss_graphs.py     reads the graph of a loss: its last division, a parameter that shows steps without torch's optimizers
batches.py         sizes and digests of batches
sampler_epochs.py  warns if a DistributedSampler stays in one epoch
replicas.py        compares the replicas of models that DistributedDataParallel keeps equal
same_samples.py    warns if all ranks train on the same samples or repeat the same training
local_gradients.py reads gradients before ranks exchange them
frameworks.py      counts of epochs and steps from transformers, Lightning and fastai
signs.py           signs of progress from any code: bars, new parameters, garbage collections

Only a worker sets hooks on libraries. Importing this package imports nothing.
"""
