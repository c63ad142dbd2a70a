"""Readings of the host that a job runs on. None creates a device context.

proc.py               /proc and /sys: states, memory and processor time of processes
descendants.py        processes that workers have started, wherever they went
cgroup.py             folders of control groups
memory.py             limits of host memory, and what is available within them
disk.py               why a file can't be written
gpus.py               GPUs, and which of them CUDA shows in this process
nvml.py               the GPU driver's own library
meter.py              memory and utilisation of devices
tpu.py                TPU chips, their topology and their lock file
notebook_service.py   Colab, Kaggle, JupyterLab, VS Code: what differs
"""
