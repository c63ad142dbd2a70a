"""Seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from nblaunch import Accelerator, context, set_seed
from nblaunch.backends.cpu import CpuBackend
from nblaunch.training.collectives import rng
from tests.training import ranks


@pytest.fixture(autouse=True)
def states_put_back() -> Iterator[None]:
    """Restore global generators, which the tests change."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])
    torch.use_deterministic_algorithms(False)


def _draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_all_generators_are_seeded() -> None:
    assert set_seed(7) == 7
    first = _draw()
    set_seed(7)
    assert _draw() == first
    set_seed(8)
    assert _draw() != first


class _Seeded(CpuBackend):
    """A device family with generators that ``torch.manual_seed`` does not reach."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)


def test_unlaunched_scripts_seed_their_device() -> None:
    backend = _Seeded()
    context.install(context.ProcessContext(context.Topology(), backend))
    set_seed(7)
    assert backend.seeds == [7]


def test_a_seed_comes_before_a_script_sets_the_variables_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    context.take()
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    set_seed(7)
    assert not context.exists()


def test_ranks_can_have_seeds_of_their_own() -> None:
    backend = context.current().backend
    context.install(
        context.ProcessContext(
            context.Topology(rank=2, local_rank=2, world_size=3, local_world_size=3), backend
        )
    )
    assert set_seed(7, device_specific=True) == 9
    assert set_seed(7, deterministic=True) == 7
    assert torch.are_deterministic_algorithms_enabled()


def test_unknown_generators_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"rng_type='npu'.*'generator', 'torch', 'cuda', 'xpu', 'xla'"):
        rng.synchronize_rng_state("npu")
    rng.synchronize_rng_state("torch")


def _agree() -> tuple[float, float]:
    Accelerator()
    rank = context.current().topology.rank
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    rng.synchronize_rng_state("generator", generator)
    rng.synchronize_rng_state("generator", None)
    rng.synchronize_rng_state("torch")
    return torch.rand((), generator=generator).item(), torch.rand(()).item()


def test_ranks_get_the_state_of_rank_0() -> None:
    zero, one = ranks.run(_agree, 2)
    assert zero == one
