"""One process that stands for one rank of many: collectives do nothing, local computation is real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(world: int = 4, rank: int = 0) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def rows(full: torch.Tensor, mesh: DeviceMesh, where: Any = None) -> DTensor:
    """`full` as a DTensor, by default over its rows, from a copy of what rank 0 holds of it."""
    where = where or Shard(0)
    local = full.chunk(mesh.size(), where.dim)[0] if isinstance(where, Shard) else full
    local = local.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, [where], run_check=False, shape=full.shape, stride=full.stride())
