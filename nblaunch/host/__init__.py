"""The host that a job runs on: readings, and requests to its operating system. Nothing creates a device context.

proc.py          /proc and /sys: states, memory and processor time of processes; folders of control groups
scheduling.py    how processes share processors: times of threads, neighbours, limits
waits.py         waits of processes that nothing outside of them can end
descendants.py   finds and ends every process that workers have started, wherever they went
memory.py        memory of processes, limits of the host, glibc's allocator
heap.py          Python's objects, which the collector leaves alone while processes are forked
descriptors.py   file descriptors: which ones forked processes must not keep, and waiting for any of several
child_statuses.py  exit statuses of children, where the process ignores SIGCHLD
signal_handlers.py  handlers of signals of this process, held back while an exception would do harm
files.py         files replaced whole; folders private to a user, opened once
machine.py       which machine this is; whether a process that left a mark still runs
disk.py          room in files: freed, and why there is none
gpus.py          NVIDIA's GPUs, which of them workers may use, and readings of devices
drm.py           AMD's and Intel's GPUs, by files below /sys
tpu.py           TPU chips, their topology, their lock file, and the slice of several hosts
"""
