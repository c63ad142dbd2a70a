"""The host of a job: readings, and requests to its operating system. No module creates a device context.

proc.py          /proc and /sys: states, memory, processor time of processes and threads; limits of control groups
waits.py         finds threads whose waits no other process can end
descendants.py   finds and ends every process that workers have started, even outside their process groups
memory.py        memory of processes, limits of the host, glibc's allocator
heap.py          hides Python's objects from the garbage collector, for forks and large imports
descriptors.py   file descriptors: which ones forked processes must not keep
exhaustion.py    what happens when no file descriptor is free
sockets.py       connections of this process to programs that it has not started
signal_handlers.py  holds this process's signal handlers back while an exception would do harm
files.py         files that are replaced atomically; folders private to a user; disk space: frees and reserves it, and
                 explains why there is none
machine.py       which machine this is; whether a process that left a mark is still running
gpus.py          GPUs, which of them workers may use, and how busy they are
tpu.py           TPU chips, their topology, their lock file, and the slice of several hosts
"""
