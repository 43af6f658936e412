"""Programs that train on real ranks, for the tests of the SPMD region and of torchao's optimizers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if os.environ.get("DTENSOR_EXT_DISABLE") != "1":
    import dtensor_ext

LAYOUTS = ["fsdp", "hsdp", "tp", "plain", "uneven"]


# --- helpers and optimizers as people write them ----------------------------------------------------------------------


def round_global(x: torch.Tensor) -> torch.Tensor:
    """Stochastic rounding to bf16 that draws the shape of `x`, which is global for a DTensor."""
    noise = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32)
    bits = x.view(torch.int32)
    low = bits & 0xFFFF
    kept = bits & 0xFFFF0000
    return torch.where(noise < low, kept + 0x10000, kept).view(torch.float32).bfloat16()


def round_like(x: torch.Tensor) -> torch.Tensor:
    """The same with randint_like, which draws on the DTensor itself."""
    bits = x.view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return ((bits + noise) & 0xFFFF0000).view(torch.float32).bfloat16()


def round_local(x: torch.Tensor) -> torch.Tensor:
    """The same on the unwrapped shard, wrapped again: the work-around that torchao 0.17 and others use."""
    if not isinstance(x, DTensor):
        return round_global(x)
    rounded = round_global(x.to_local())
    return DTensor.from_local(rounded, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def round_local_filled(x: torch.Tensor) -> torch.Tensor:
    """On the unwrapped shard, noise filled in place."""
    local = x.to_local() if isinstance(x, DTensor) else x
    noise = torch.empty(local.shape, dtype=torch.int32).random_(0, 1 << 16)
    rounded = ((local.view(torch.int32) + noise) & 0xFFFF0000).view(torch.float32).bfloat16()
    if not isinstance(x, DTensor):
        return rounded
    return DTensor.from_local(rounded, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


HELPERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "global": round_global,
    "like": round_like,
    "local": round_local,
    "local_filled": round_local_filled,
}


class Sgd(torch.optim.Optimizer):
    """SGD on bf16 parameters with stochastic rounding by `helper`."""

    def __init__(self, params: Any, lr: float = 1e-2, helper: str = "global") -> None:
        super().__init__(params, {"lr": lr})
        self.helper = HELPERS[helper]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.helper(p.float() - group["lr"] * p.grad.float()))
        return loss


# --- parameters on every layout ---------------------------------------------------------------------------------------


def model(bias: bool = True, width: int = 64, layers: int = 2) -> nn.Module:
    """The same weights on every rank, whatever its seed."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(width, 2 * width, bias=bias), nn.ReLU(), nn.Linear(2 * width, width, bias=bias))
    net = net[: 2 * layers - 1]
    torch.set_rng_state(state)
    return net.bfloat16()


def place(layout: str, world: int, net: nn.Module) -> list[nn.Parameter]:
    """`net`'s parameters as DTensors."""
    if layout == "one":
        return list(net.parameters())
    if layout == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        # RowwiseParallel keeps its bias replicated over tp, so tp copies exist beside tp shards.
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], {name: plan[name] for name, _ in net.named_children() if name in plan})
        fully_shard(net, mesh=mesh["dp"])
    elif layout == "submesh":
        # Sharded over dp alone; the ranks of the other dim hold copies that the parameters' mesh does not know of.
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
        fully_shard(net, mesh=mesh["dp"])
    elif layout == "mixed":
        # Some parameters on the whole mesh, some on a slice of it.
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    elif layout in ("plain", "uneven"):
        mesh = init_device_mesh("cpu", (world,) if layout == "plain" else (2, world // 2))
        for module in net.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if layout == "plain":
                    where = [Shard(0) if p.ndim == 2 else Replicate()]
                else:
                    # Uneven and empty shards beside copies over the first dim.
                    p = nn.Parameter(p[:5].detach().clone())
                    where = [Replicate(), Shard(0)] if p.ndim == 2 else [Shard(0), Shard(0)]
                full = distribute_tensor(p.detach(), mesh, where, src_data_rank=None)
                setattr(module, name, nn.Parameter(full))
    else:
        raise ValueError(layout)
    return list(net.parameters())


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """The same global gradients on every layout."""
    for i, p in enumerate(params):
        full = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i)).to(p.dtype)
        p.grad = (
            distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else full
        )


# --- what a test looks at ---------------------------------------------------------------------------------------------


def local(x: torch.Tensor) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def global_index(p: Any, rank: int) -> Any:
    """Equal on ranks that hold copies: the global positions of the local elements."""
    if not isinstance(p, DTensor):
        return ()
    count = torch.arange(p.numel()).reshape(p.shape)
    mine = distribute_tensor(count, p.device_mesh, p.placements, src_data_rank=None).to_local()
    return tuple(mine.reshape(-1).tolist())


def differing_copies(params: list[nn.Parameter], rank: int, world: int) -> int:
    """How many weights differ between ranks that hold copies of them. The same number on every rank."""
    mine = [(global_index(p, rank), local(p).float()) for p in params]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    different = 0
    for i in range(len(params)):
        first: dict[Any, torch.Tensor] = {}
        for each in everyone:
            index, value = each[i]
            if index in first:
                different += int((first[index] != value).sum())
            else:
                first[index] = value
    return different


def full(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def seeds_apart(rank: int) -> None:
    """Ranks seeded differently, as people do for dropout and data."""
    torch.manual_seed(1234 + rank)


def force_eager() -> None:
    torch.compiler.set_stance("force_eager")


def torchao_optimizers(path: str | None) -> dict[str, Any]:
    """torchao's optimizers by name: of the version in the environment, or of the one under `path`."""
    if path:
        sys.path.insert(0, path)
        import torchao.prototype.low_bit_optim as optim
        from torchao.prototype.low_bit_optim.adam import _AdamW
    else:
        import torchao.optim as optim
        from torchao.optim.adam import _AdamW
    names = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8")
    return {"_AdamW": _AdamW, **{name: getattr(optim, name) for name in names}}


def stream_seed(seed: int) -> None:
    """Fix the agreed stream, so that runs on different layouts can be compared."""
    dtensor_ext.manual_seed(seed)
