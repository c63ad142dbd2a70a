"""Makes Python on Linux lack what macOS lacks: /proc, memory files, process descriptors, prctl.

Every process of a test with this folder on PYTHONPATH imports this module. It first imports other libraries that check
the system's name at import.
"""

import builtins
import ctypes
import io
import os
import resource
import signal
import socket
import subprocess  # noqa: F401
import sys
import sysconfig

import cloudpickle  # noqa: F401
import ipykernel  # noqa: F401
import ipywidgets  # noqa: F401
import torch.distributed  # noqa: F401

sysconfig.get_config_vars()
for module, names in {
    os: "memfd_create MFD_CLOEXEC pidfd_open sched_getaffinity pipe2 eventfd posix_fallocate",
    signal: "SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait",
    resource: "RLIMIT_RTTIME prlimit",
    socket: "SO_PEERCRED",
}.items():
    for name in names.split():
        if hasattr(module, name):  # novm
            delattr(module, name)


def _without_proc(function):
    def find(path=".", *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "not on macOS", str(path))
        return function(path, *args, **options)

    return find


for name in ("open", "listdir", "scandir", "readlink", "stat", "statvfs"):
    setattr(os, name, _without_proc(getattr(os, name)))
builtins.open = io.open = _without_proc(open)


class _Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt", "malloc_trim", "fallocate"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = _Library
sys.platform = "darwin"

from nblaunch.backends import base  # noqa: E402

base.LOOPBACK = "lo"  # the interface of the real machine
