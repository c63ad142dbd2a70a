"""Functions that scripts import in addition to the Accelerator. No other module in ``nblaunch.training`` imports them.

helpers.py       small functions and constants of Accelerate's utils: packages, environment variables, modules
local_sgd.py     averages weights every few steps, instead of gradients
log.py           logging and progress bars in several processes
memory.py        device memory: releases it, and finds the largest batch that fits
"""
