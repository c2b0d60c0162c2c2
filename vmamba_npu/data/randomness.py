"""Random numbers that depend on named numbers (seed, epoch, index) alone, never on what was drawn before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """One 63-bit number from several, such that near inputs give unrelated outputs."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(number: int) -> None:
    """Seed the generators of python, numpy and torch (every device) that layers and transforms draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the CPU generators of python, numpy and torch inside the block, and put their states back after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the accelerators too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
