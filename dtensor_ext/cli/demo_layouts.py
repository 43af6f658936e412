"""The layouts of the demo: one small model, cut over four ranks in four ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

WORLD = 4
SAMPLES, WIDTH, HIDDEN = 256, 128, 256

# The loss over this rank's part of the data.
Loss = Callable[[], torch.Tensor]


class Layouts:
    """The meshes, made once, and the data. `build` makes a fresh model for every row."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
        self.hsdp = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
        self.grid = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
        # Every rank makes all data alike, from a generator of its own, and later takes its part.
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, WIDTH, generator=g).bfloat16()
        self.y = torch.tanh(self.x.float() @ torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5).bfloat16()

    def build(self, layout: str) -> tuple[torch.nn.Module, Loss]:
        """The model, cut as `layout` (one of `demo_rows.LAYOUTS`) says, and its loss. Equal weights every time."""
        torch.manual_seed(self.seed)
        model = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH)
        ).bfloat16()
        if layout == "FSDP2":
            fully_shard(model, mesh=self.line)
            return model, self._loss_of_part(model, self.line.get_local_rank(), WORLD)
        if layout == "HSDP 2x2":
            fully_shard(model, mesh=self.hsdp)
            return model, self._loss_of_part(model, self.line.get_local_rank(), WORLD)
        if layout == "FSDP2 x TP 2x2":
            # The LayerNorm stays out of the plan, so its parameters live on the "dp" mesh alone, once for each TP rank.
            parallelize_module(model, self.grid["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
            fully_shard(model, mesh=self.grid["dp"])
            # TP peers work on the same samples.
            return model, self._loss_of_part(model, self.grid.get_local_rank("dp"), self.grid["dp"].size())
        if layout == "distribute_tensor":
            _distribute(model, self.line)
            return model, self._loss_of_dtensors(model)
        raise ValueError(f"no layout {layout!r}")

    def _loss_of_part(self, model: torch.nn.Module, index: int, parts: int) -> Loss:
        x, y = self.x.chunk(parts)[index], self.y.chunk(parts)[index]
        return lambda: functional.mse_loss(model(x).float(), y.float())

    def _loss_of_dtensors(self, model: torch.nn.Module) -> Loss:
        x, y = (distribute_tensor(t, self.line, [Replicate()]) for t in (self.x, self.y))
        return lambda: functional.mse_loss(model(x).float(), y.float())


def _distribute(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """The first matrix by rows, the second by columns, vectors copied: tensor parallelism without its classes."""
    for name, module in model.named_children():
        for key, p in list(module.named_parameters()):
            placement: Placement = Shard(0 if name == "1" else 1) if p.ndim == 2 else Replicate()
            module.register_parameter(key, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
