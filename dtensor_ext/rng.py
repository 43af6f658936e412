"""Seeds, and the default generators that random ops draw from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def derive(*parts: int) -> int:
    """A 63-bit seed that depends on every part: equal parts, equal seed; otherwise unrelated ones."""
    data = b"".join(int(p).to_bytes(8, "little", signed=True) for p in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class DefaultGenerator:
    """The default generator of one device: read its state, write it, seed it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def get(self) -> torch.Tensor:
        if self._module is None:
            return torch.default_generator.get_state()
        return self._module.get_rng_state(self.device)

    def set(self, state: torch.Tensor) -> None:
        if self._module is None:
            torch.default_generator.set_state(state)
        else:
            self._module.set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        if self._module is None:
            torch.default_generator.manual_seed(seed)
        else:
            with self._module.device(self.device):
                self._module.manual_seed(seed)


def default_generators(device_types: Iterable[str]) -> list[DefaultGenerator]:
    """The CPU's default generator and those of the current devices of `device_types` that have one."""
    found = [DefaultGenerator(torch.device("cpu"))]
    for name in sorted(set(device_types) - {"cpu", "meta"}):
        module = torch.get_device_module(name)
        if hasattr(module, "get_rng_state") and module.is_available():
            found.append(DefaultGenerator(torch.device(name, module.current_device())))
    return found


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the default generator of `device` draws from `seed`; afterwards it continues as before."""
    generator = DefaultGenerator(device)
    state = generator.get()
    try:
        generator.seed(seed)
        yield
    finally:
        generator.set(state)
