"""Reads the state of a job's host, and makes requests to its operating system, without creating a device context.

proc.py          /proc and /sys: states, memory, processor time of processes and threads; limits of control groups
waits.py         finds threads whose waits no other process can end
descendants.py   finds and ends every process that workers have started, even outside their process groups
memory.py        memory of processes, limits of the host, glibc's allocator
heap.py          hides Python's objects from the garbage collector, for forks and large imports
descriptors.py   file descriptors: which ones forked processes must not keep
exhaustion.py    detects that no file descriptor is free, and waits for one
sockets.py       connections from this process to programs that it did not start
signal_handlers.py  holds this process's signal handlers back while an exception would do harm
files.py         files that are replaced atomically; folders private to a user; disk space: frees and reserves it, and
                 explains why there is none
machine.py       which machine this is; whether a process that left a mark is still running
gpus.py          GPUs, which of them workers may use, and how busy they are
tpu.py           TPU chips, their topology, their lock file, and the slice of several hosts
"""
