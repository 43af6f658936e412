"""What other libraries need, through their public hooks only, and only where the installed version lacks it.

Nothing here imports such a library: an integration acts once the program itself has imported it.
"""

from __future__ import annotations

import torch

from ..layouts import UNKNOWN
from . import torchao


def activate() -> None:
    """Fill in what the libraries that are imported by now lack. Cheap and idempotent: called before each step."""
    torchao.activate()


def draw_kind(optimizer: torch.optim.Optimizer) -> str:
    """Whether `optimizer`'s helpers draw the global or the local shape, as far as an integration knows."""
    return torchao.draw_kind(optimizer) or UNKNOWN
