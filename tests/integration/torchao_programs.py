"""What the tests of torchao's optimizers run on each rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from training import (
    differing_copies,
    force_eager,
    full,
    model,
    place,
    seeds_apart,
    set_grads,
    stream_seed,
    torchao_optimizers,
)

# Wide enough that torchao quantizes the state of each shard: 4,096 values.
WIDTH = 128


def train(
    rank: int, world: int, path: str | None, names: list[str], layouts: list[str], steps: int, eager: bool
) -> dict[Any, Any]:
    """For each optimizer and layout: how many copies differ after `steps`, or the error."""
    if eager:
        force_eager()
    optimizers = torchao_optimizers(path)
    seen: dict[Any, Any] = {}
    for layout in layouts:
        for name in names:
            seeds_apart(rank)
            # Compiled, one weight: each parameter of another shape is compiled by itself.
            params = place(layout, world, model(width=WIDTH, bias=eager, layers=2 if eager else 1))
            before = [full(p) for p in params]
            optimizer = optimizers[name](params, lr=1e-2, bf16_stochastic_round=True)
            user = torch.get_rng_state()
            try:
                for step in range(steps):
                    set_grads(params, step)
                    optimizer.step()
            except Exception as e:
                seen[name, layout] = f"{type(e).__name__}: {e}"
                continue
            if layout == "one":
                seen[name, layout] = 0
                continue
            if all(torch.equal(a, full(p)) for a, p in zip(before, params, strict=True)):
                seen[name, layout] = "nothing was trained"
            elif torch.equal(user, torch.get_rng_state()) is not _has_extension():
                seen[name, layout] = "the user's generator"
            else:
                seen[name, layout] = differing_copies(params, rank, world)
    return seen


def _has_extension() -> bool:
    import os

    return os.environ.get("DTENSOR_EXT_DISABLE") != "1"


def bits(rank: int, world: int, path: str | None, layouts: list[str], steps: int, eager: bool) -> dict[str, Any]:
    """The parameters that `_AdamW` ends with on each layout, from one agreed stream."""
    import dtensor_ext

    if eager:
        force_eager()
    optimizers = torchao_optimizers(path)
    seen: dict[str, Any] = {}
    for layout in layouts:
        seeds_apart(rank)
        stream_seed(11)
        params = place(layout, world, model(width=64, bias=eager))
        optimizer = optimizers["_AdamW"](params, lr=1e-2, bf16_stochastic_round=True)
        for step in range(steps):
            set_grads(params, step)
            with dtensor_ext.spmd_region() if layout == "one" else nullcontext():
                optimizer.step()
        seen[layout] = [full(p) for p in params]
    return seen
