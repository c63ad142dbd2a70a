"""Requirements for every device family: on this machine, with or without such devices, and with simulated GPUs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nblaunch import backends, packages
from nblaunch.backends.base import Backend
from nblaunch.topology import Topology
from nblaunch.training.state import DistributedType
from tests.contracts import simulated

TOPOLOGY = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2, master_port=1)


class Family(NamedTuple):
    """A backend on this machine, or with simulated GPUs.

    ``draw`` draws random numbers on simulated GPUs; without, it is None.
    """

    backend: Backend
    draw: Callable[[], list[float]] | None = None


ALL = [*sorted(backends.discover()), *(f"simulated {kind}" for kind in simulated.KINDS)]
# All other families are tested with the newest torch; torch_xla has a separate environment.
FAMILIES = ["xla"] if packages.is_installed("torch_xla") else ALL


@pytest.fixture(params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Family]:
    name = request.param.removeprefix("simulated ")
    backend = backends.discover()[name]
    if name == request.param:
        yield Family(backend)
        return
    fake = simulated.install(name, tmp_path / "here", monkeypatch)
    yield Family(backend, fake.draw)
    simulated.forget()


@pytest.fixture
def backend(family: Family) -> Backend:
    return family.backend


def test_backend_describes_itself(backend: Backend) -> None:
    assert re.fullmatch("[a-z][a-z0-9_]*", backend.name)
    assert backend.device_noun
    assert backend.dist_backend
    assert isinstance(backend.is_oversubscribable, bool)
    assert backend.title
    assert backend.distributed_type in DistributedType.__members__
    assert backend.is_present() or not backend.affinity()
    assert backend.name in backends.names()


def test_a_backend_is_usable_or_says_why_not(backend: Backend) -> None:
    assert backend.affinity() >= 0
    if backend.affinity() > 0:
        assert backend.device_count() >= 1
        assert backends.choose(backend.name) is backend
    else:
        assert len(backend.unavailable_reason()) > 10
        with pytest.raises(RuntimeError, match=re.escape(f"backend={backend.name!r} can't be used here: ")):
            backends.choose(backend.name)


def test_the_best_backend_is_chosen() -> None:
    best = backends.choose("auto")
    assert all(best.affinity() >= other.affinity() for other in backends.discover().values())


LAUNCHER_HALVES = """
import os, sys, threading, traceback
from pathlib import Path
from nblaunch import backends
from nblaunch.topology import Topology

def check(family, folder):
    name = family.removeprefix("simulated ")
    if name != family:
        import pytest
        from tests.contracts import simulated
        simulated.install(name, folder, pytest.MonkeyPatch())
    backend = backends.discover()[name]
    before = dict(os.environ), threading.active_count(), sorted(os.listdir("/proc/self/fd"))
    backend.affinity(), backend.device_count(), backend.is_oversubscribable
    hazard, memory = backend.fork_hazard(), backend.device_memory()
    backend.worker_env(Topology(rank=1, local_rank=1, world_size=2, local_world_size=2, master_port=1))
    assert before == (dict(os.environ), threading.active_count(), sorted(os.listdir("/proc/self/fd")))
    if "torch" in sys.modules:
        assert not sys.modules["torch"].cuda.is_initialized()
    assert hazard is None, hazard
    assert memory is None or memory[0] == 0, memory

failed = []
for number, family in enumerate(sys.argv[2:]):
    if family.startswith("simulated"):
        import torch  # once, and after the families of this machine, of which some do not import it
    if not (pid := os.fork()):
        try:
            check(family, Path(sys.argv[1]) / str(number))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        failed.append(family)
print(failed)
"""


def test_launcher_halves_stay_light_and_forkable(tmp_path: Path) -> None:
    """This runs in separate processes, one per family: the launcher must not create a context."""
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER_HALVES, str(tmp_path), *FAMILIES],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout == "[]\n", ended.stderr


def test_worker_environments_are_local_text(backend: Backend) -> None:
    changes = backend.worker_env(TOPOLOGY)
    assert all(
        isinstance(name, str) and (value is None or isinstance(value, str)) for name, value in changes.items()
    )
    assert not changes.keys() & TOPOLOGY.to_env().keys()
    assert changes.get("GLOO_SOCKET_IFNAME") in ("lo", "lo0")
    assert changes["TORCH_DIST_INIT_BARRIER"] == "1", "no rank may leave while others still join"


def test_only_known_precisions_are_accepted(backend: Backend) -> None:
    if backend.affinity() == 0:
        pytest.skip("no such device here")
    assert backend.precision_problem("no") is None
    for precision in ("fp16", "bf16"):
        problem = backend.precision_problem(precision)
        assert problem is None or precision in problem


def test_random_states_can_be_restored(family: Family) -> None:
    backend = family.backend
    if backend.affinity() == 0:
        pytest.skip("no such device here")

    def draw() -> list[float]:
        device = backend.device(Topology())
        assert device.type == backend.device_type
        return family.draw() if family.draw is not None else torch.rand(8, device=device).tolist()

    # The state of the CPU's generator belongs to every process, not to a backend.
    state, of_cpu = dict(backend.rng_state()), torch.get_rng_state()
    drawn = draw()
    assert draw() != drawn
    backend.set_rng_state(state)
    torch.set_rng_state(of_cpu)
    assert draw() == drawn


def test_a_backend_is_concrete(backend: Backend) -> None:
    assert not inspect.isabstract(type(backend))


def test_outside_report_is_plain_and_leaves_nothing_open(backend: Backend) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    meter = backend.open_meter()
    assert all(share is None or 0 <= share <= 1 for share in meter.read())
    meter.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert all(isinstance(note, str) for note in backend.launch_notes(2))
    assert all(len(frame) == 3 for frame in backend.first_use())


@pytest.mark.parametrize("family", [f"simulated {kind}" for kind in simulated.KINDS], indirect=True)
def test_simulated_devices_can_be_used(family: Family) -> None:
    """Otherwise the tests above would not test these families."""
    backend = family.backend
    assert backend.affinity() > 0
    assert backends.choose("auto") is backend
    readings = backend.open_meter().read()
    assert len(readings) in (0, backend.device_count())


def test_unrelated_errors_are_not_explained(backend: Backend) -> None:
    assert backend.explain_failure(KeyError("lr")) == ()
    assert backend.explain_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory")) == ()
