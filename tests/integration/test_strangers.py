"""A process that is not of the job, in the place of one of its ranks: nothing that it sends is unpickled."""

from __future__ import annotations

from pathlib import Path

from tests.kernels import Kernel

CELL = """
import os
from contextlib import suppress
import nblaunch
from nblaunch import Accelerator, context, notebook_launcher

class Crime:
    def __init__(self, witness):
        self.witness = witness
    def __reduce__(self):
        return os.mkdir, (self.witness,)

def meet(witness):
    accelerator = Accelerator()
    ranks = accelerator.gather_object([accelerator.process_index])
    if accelerator.process_index == 1:
        context.current().key = b""  # all that a stranger would not have
        with suppress(Exception):  # to pickle, the signature before what rank 0 sends may mean anything
            accelerator.gather_object([Crime(witness)])
    else:
        accelerator.gather_object([ranks])

def launch(witness, start_method):
    settings = dict(backend="cpu", dashboard="none", start_method=start_method)
    try:
        return notebook_launcher(meet, (witness,), 2, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
"""


def test_objects_of_strangers_are_refused(shared: Kernel, tmp_path: Path) -> None:
    shared.run(CELL)
    for start_method in ("fork", "spawn"):
        witness = tmp_path / start_method
        name, text = shared.run(f"launch({str(witness)!r}, {start_method!r})").value
        assert (name, "does not carry the signature of this job" in text) == ("ValueError", True)
        assert not witness.exists()
