"""What the SPMD region costs an optimizer step on DTensors: with the extension against without, in turn, in one run.

One process plays rank 0 of four (a process group that communicates nothing), so only the work of one rank is timed.

    python tests/benchmarks/region_cost.py [rounds]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor_ext


def round_local(x: DTensor) -> DTensor:
    """The work-around that runs on bare torch too: unwrap, round, wrap."""
    local = x.to_local()
    noise = torch.randint(0, 1 << 16, local.shape, dtype=torch.int32)
    rounded = ((local.view(torch.int32) + noise) & 0xFFFF0000).view(torch.float32).bfloat16()
    return DTensor.from_local(rounded, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


class RoundingSgd(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(round_local(p.float() - 1e-2 * p.grad.float()))


def parameters(count: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    mesh = init_device_mesh("cpu", (4,))
    found = []
    for _ in range(count):
        p = torch.nn.Parameter(distribute_tensor(torch.randn(64, 64, dtype=dtype), mesh, [Shard(0)]))
        p.grad = torch.randn_like(p)
        found.append(p)
    return found


def seconds(step: Callable[[], Any], steps: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main(rounds: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    torch.set_num_threads(1)
    cases: dict[str, torch.optim.Optimizer] = {
        "AdamW(foreach=True), 64 parameters": torch.optim.AdamW(parameters(64, torch.float32), foreach=True),
        "AdamW(fused=True), 64 parameters": torch.optim.AdamW(parameters(64, torch.float32), fused=True),
        "AdamW(foreach=False), 64 parameters": torch.optim.AdamW(parameters(64, torch.float32), foreach=False),
        "SGD with stochastic rounding, unwrapped, 16 parameters": RoundingSgd(parameters(16, torch.bfloat16)),
    }
    for name, optimizer in cases.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for installed in (True, False):
                dtensor_ext.install() if installed else dtensor_ext.uninstall()
                optimizer.step()
                times[installed].append(seconds(optimizer.step))
        ours, core = (statistics.median(times[k]) for k in (True, False))
        print(f"{name}: {core * 1e3:.2f} ms without, {ours * 1e3:.2f} ms with: {ours / core:.3f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
