"""An optimizer as people write it by hand: SGD with momentum that rounds its bf16 weights stochastically.

It knows nothing of DTensor: the helper asks for as many random numbers as the tensor's shape says, which on a DTensor
is the global shape, and reads the float's bits in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bf16, up with the probability that makes the expected value right.

    bf16 is the upper half of float32's bits. The lower half says how far between two bf16 numbers `x` lies: carrying
    one into the upper half when a uniform 16-bit number is below it rounds away from zero that often.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    bits = x.view(torch.int32)
    fraction = bits & 0xFFFF
    truncated = bits - fraction
    rounded = torch.where(noise < fraction, truncated + (1 << 16), truncated)
    return rounded.view(torch.float32).to(torch.bfloat16)


class SRSGD(torch.optim.Optimizer):
    """SGD with momentum; float32 arithmetic and momentum, bf16 weights, stochastically rounded."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` as every torch optimizer takes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["momentum"].mul_(group["momentum"]).add_(p.grad.float())
                p.copy_(round_to_bf16(p.float() - group["lr"] * state["momentum"]))
        return loss
