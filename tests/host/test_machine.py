"""Which machine a process runs on."""

from __future__ import annotations

import os
import threading

from nblaunch.host.machine import Machine, this_machine
from tests.no_descriptors import no_descriptor_left


def test_a_process_without_descriptors_waits_to_identify_its_machine() -> None:
    here = this_machine()
    pid = os.fork()
    if pid == 0:  # it identifies its machine anew
        seen: list[Machine] = []
        asking = threading.Thread(target=lambda: seen.append(this_machine()))
        with no_descriptor_left():
            asking.start()
            asking.join(0.1)
        asking.join(180)
        os._exit(0 if seen == [here] else 1)
    assert os.waitpid(pid, 0)[1] == 0
