"""What scripts import beside the Accelerator. Nothing else in ``nblaunch.training`` imports it.

constants.py     versions that scripts compare with
environment.py   variables, and what is installed
helpers.py       small helpers of Accelerate's utils
local_sgd.py     average weights now and then, instead of gradients
log.py           logging and progress bars of several processes
memory.py        memory of a device: release it, find the largest batch that fits
"""
