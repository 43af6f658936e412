"""What the tests of the compile cache run on each rank: ranks compile one after another, on one folder."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

if os.environ.get("DTENSOR_EXT_DISABLE") != "1":
    import dtensor_ext  # noqa: F401


def in_turn(rank: int, world: int, which: str) -> dict[str, Any]:
    """Each rank compiles in its turn. What it got, what it should have got, and what the caches said."""
    mesh = init_device_mesh("cpu", (world,))
    x = torch.arange(12.0).reshape(3, 4)
    if which == "redistribute":
        d = DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        def f(t: Any) -> Any:
            return (t * 2).redistribute(placements=[Shard(0)]) + 1

        pieces = (x * 2 + 1).chunk(world)
        want = pieces[rank] if rank < len(pieces) else x[:0]
    elif which == "uneven":
        # Three rows over two ranks. Row sums keep the shard.
        d = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

        def f(t: Any) -> Any:
            return t.sum(dim=1) * t.to_local().shape[0]

        pieces = x.chunk(world)
        mine = pieces[rank] if rank < len(pieces) else x[:0]
        want = mine.sum(1) * mine.shape[0]
    elif which == "made inside":
        # No DTensor among the inputs.
        d = x

        def f(t: Any) -> Any:
            made = DTensor.from_local(t * 2, mesh, [Replicate()], run_check=False)
            return made.redistribute(placements=[Shard(0)]) + 1

        pieces = (x * 2 + 1).chunk(world)
        want = pieces[rank] if rank < len(pieces) else x[:0]
    else:
        # Nothing here depends on the rank: the code is shared.
        d = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)], src_data_rank=None)

        def f(t: Any) -> Any:
            return t * 3 + 1

        want = d.to_local() * 3 + 1
    compiled = torch.compile(f, fullgraph=True, dynamic=False)
    out = None
    for turn in range(world):
        if turn == rank:
            counters.clear()
            out = compiled(d)
        dist.barrier()
    assert isinstance(out, DTensor)
    return {
        "got": out.to_local().tolist(),
        "want": want.tolist(),
        "aot": {k: v for k, v in counters["aot_autograd"].items() if "cache" in k},
        "inductor": {k: v for k, v in counters["inductor"].items() if "fxgraph_cache" in k},
    }
