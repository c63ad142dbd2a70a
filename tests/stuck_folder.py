"""A folder in which every access blocks forever inside the system, as on a network file system without its server.

It is a FUSE file system whose server reads requests and never answers. Not even SIGKILL ends a process that waits for
an answer (``request_wait_answer`` in fs/fuse/dev.c waits for a request that the server has read).
Protocol: include/uapi/linux/fuse.h. Needs root and ``/dev/fuse``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path

_INIT = 26
_REQUEST = struct.Struct("<IIQ")  # length, opcode, unique
_REPLY = struct.Struct("<IiQ")  # length, error, unique
_INIT_REPLY = struct.Struct("<II56x")  # major, minor, then zeros
_FORCE_AND_DETACH = 1 | 2

_libc = ctypes.CDLL(None, use_errno=True)


def can_be_made() -> bool:
    """Return whether this process may mount such a folder."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


class StuckFolder:
    """A file system on the empty folder ``path``, until :meth:`release` frees blocked processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_entered = threading.Event()
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0"
        if _libc.mount(b"stuck", os.fsencode(path), b"fuse", 0, options.encode()) != 0:
            error = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(error, os.strerror(error), str(path))
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def release(self) -> None:
        """Unmount: every blocked access fails, and killed processes end."""
        if self._server.is_alive():
            _libc.umount2(os.fsencode(self.path), _FORCE_AND_DETACH)
            self._server.join()
            os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 17)
            except OSError:  # ENODEV: unmounted
                return
            _, opcode, unique = _REQUEST.unpack_from(request)
            if opcode == _INIT:
                body = _INIT_REPLY.pack(7, 19)
                os.write(self._fd, _REPLY.pack(_REPLY.size + len(body), 0, unique) + body)
            else:
                self.is_entered.set()
