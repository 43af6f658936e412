"""torchao: TBD"""

from __future__ import annotations

import torch


def activate() -> None: ...


def draw_kind(optimizer: torch.optim.Optimizer) -> str | None:
    return None
