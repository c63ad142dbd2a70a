"""A process's random states: ``random``, NumPy's global generator and torch's CPU generator.

All workers of a launch begin with the states that the kernel had at launch, under every start method and in
every attempt. The kernel's generators then advance, as if the function had run in the cell. The next launch draws
different numbers, but a seed that is set before a launch still determines all later launches.

The kernel may not have loaded a library's generator, such as ``numpy.random``, which ``import numpy`` does not import.
In workers, such a generator begins with a seed derived from the state of ``random``, so that ranks draw the same
numbers.
"""

from __future__ import annotations

import pickle
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from nblaunch import packages

_SEED_BITS = 256
_NUMPY_SEED = f"{_SEED_BITS // 32}I"
_TORCH_SEED_BYTES = 8  # a state begins with the seed that initial_seed() returns


@dataclass(frozen=True)
class RandomStates:
    """States of the generators that a process had loaded at a point in time.

    Args:
        random: state of ``random``.
        numpy: pickled state of NumPy's generator, because unpickling it imports NumPy; None if NumPy was not loaded.
        torch: state of torch's generator; None if torch was not loaded.
    """

    random: tuple[Any, ...]
    numpy: bytes | None
    torch: bytes | None

    @classmethod
    def of_this_process(cls) -> RandomStates:
        """Return the current states without importing anything."""
        numpy, torch = _imported("numpy.random"), _imported("torch")
        return cls(
            random=random.getstate(),
            numpy=None if numpy is None else pickle.dumps(numpy.get_state(legacy=False)),
            torch=None if torch is None else torch.get_rng_state().numpy().tobytes(),
        )

    def restore(self) -> None:
        """Put this process's generators into these states; set a library's generator once the library is imported."""
        random.setstate(self.random)
        if self.numpy is not None:
            packages.when_imported("numpy.random", self._restore_numpy)
        if self.torch is not None:
            packages.when_imported("torch", self._restore_torch)

    def restore_in_worker(self) -> None:
        """Restore the states, and seed generators that the kernel had not loaded."""
        self.restore()
        seed_unknown(self.random, [name for name in _SEEDED if getattr(self, name.partition(".")[0]) is None])

    def _restore_numpy(self, numpy_random: Any) -> None:
        assert self.numpy is not None
        state = pickle.loads(self.numpy)
        kind = state["bit_generator"]
        if kind != numpy_random.get_state(legacy=False)["bit_generator"]:
            numpy_random.set_bit_generator(getattr(numpy_random, kind)())
        numpy_random.set_state(state)

    def _restore_torch(self, torch: Any) -> None:
        assert self.torch is not None
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put this process's generators into these states while the block runs, then restore the current states."""
        present = RandomStates.of_this_process()
        self.restore()
        try:
            yield
        finally:
            present.restore()


def seed_unknown(state: tuple[Any, ...], names: Iterable[str]) -> None:
    """Seed libraries' random generators once the libraries are imported, in the same way on all ranks.

    Args:
        state: the state of ``random`` in the kernel.
        names: ``"numpy.random"`` or ``"torch"``.
    """
    source = random.Random()
    source.setstate(state)
    number = source.getrandbits(_SEED_BITS)
    for name in names:
        packages.when_imported(name, partial(_SEEDED[name], number))


def _seed_numpy(number: int, numpy_random: Any) -> None:
    numpy_random.seed(struct.unpack(_NUMPY_SEED, number.to_bytes(_SEED_BITS // 8, "little")))


def _seed_torch(number: int, torch: Any) -> None:
    torch.default_generator.manual_seed(number % (1 << 8 * _TORCH_SEED_BYTES))


_SEEDED = {"numpy.random": _seed_numpy, "torch": _seed_torch}


def unknown_generators() -> list[str]:
    """Return the generators that this process has not loaded."""
    return [name for name in _SEEDED if _imported(name) is None]


def move_on() -> None:
    """Advance this process's generators to states that follow from the current ones and share no numbers with them.

    Each generator draws a number and is seeded with it. If it only drew a number, the next launch would get the same
    sequence shifted by one.
    """
    random.seed(random.getrandbits(_SEED_BITS))
    numpy, torch = _imported("numpy.random"), _imported("torch")
    if numpy is not None:
        _move_numpy_on(numpy)
    if torch is not None:
        _move_torch_on(torch)


def _imported(name: str) -> Any:
    """Return a module; None if it was not imported, or if a thread is importing it at this moment."""
    module = sys.modules.get(name)
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)  # as importlib checks
    return None if is_partial else module


def _move_numpy_on(numpy_random: Any) -> None:
    # NumPy 1.24 can replace the generator with one that the global functions can't seed.
    generator = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
    if generator is None or isinstance(generator, numpy_random.MT19937):
        # Don't call randint(), which calls NumPy functions and so copies pages that workers share.
        numpy_random.seed(struct.unpack(_NUMPY_SEED, numpy_random.bytes(struct.calcsize(_NUMPY_SEED))))
        return
    if hasattr(generator, "jumped"):
        generator.state = generator.jumped().state
    else:
        seed = generator.random_raw(_SEED_BITS // 64)
        generator.state = type(generator)(numpy_random.SeedSequence(seed.tolist())).state


def _move_torch_on(torch: Any) -> None:
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
    state = torch.Generator().manual_seed(seed).get_state()
    state[:_TORCH_SEED_BYTES] = torch.get_rng_state()[:_TORCH_SEED_BYTES]  # keep the user's initial_seed()
    torch.set_rng_state(state)
