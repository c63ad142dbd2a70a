"""Readings of the host that a job runs on. None creates a device context.

proc                /proc and /sys: states, memory and processor time of processes
descendants         processes that workers have started, wherever they went
cgroup              folders of control groups; memory: limits, and what is available within them
disk                why a file can't be written
gpus                GPUs and which of them CUDA shows in this process; nvml: the driver's library
meter               memory and utilisation of devices
tpu                 TPU chips, their topology and their lock file
notebook_service    Colab, Kaggle, JupyterLab, VS Code: what differs
"""
