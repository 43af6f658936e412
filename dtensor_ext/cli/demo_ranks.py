"""What the demo runs on each of its ranks: trains every row, compares copies, reports."""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import dtensor_ext

from .demo_layouts import WORLD, Layouts
from .demo_rows import BY_HAND, Result, Row
from .sr_sgd import SRSGD

NO_TORCHAO = "torchao is not installed"


@dataclass(frozen=True)
class Task:
    """What all ranks of one side are to do."""

    rows: list[Row]
    steps: int
    seed: int
    compiled: bool
    extended: bool
    folder: str
    # For each collective. A rank that fails alone must not make the others wait for ever.
    seconds: float


def work(rank: int, task: Task, results: Any) -> None:
    """Entry of a rank's process. Rank 0 puts a `Result` a row into the queue `results`."""
    # Warnings of the libraries would tear the table apart; `demo` shows this file if the rank dies.
    with open(f"{task.folder}/{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    assert dtensor_ext.is_installed() == task.extended, "DTENSOR_EXT_DISABLE did not reach this process"
    torch.set_num_threads(1)
    if not task.compiled:
        # torchao compiles its step by itself, which takes minutes over all rows.
        torch.compiler.set_stance("force_eager")
    dist.init_process_group(
        "gloo",
        init_method=Path(task.folder, "store").as_uri(),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=task.seconds),
    )
    layouts = Layouts(task.seed)
    for row in task.rows:
        result = _row(row, rank, task, layouts)
        if rank == 0:
            results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _row(row: Row, rank: int, task: Task, layouts: Layouts) -> Result:
    """Train one row and compare with the other ranks. The same on every rank."""
    name, layout = row
    if name != BY_HAND and importlib.util.find_spec("torchao") is None:
        return Result(skipped=NO_TORCHAO)
    report = _Report()
    try:
        model, loss = layouts.build(layout)
        # What this demo is about: ranks whose generators differ, as most programs have them.
        torch.manual_seed(task.seed + rank)
        optimizer = _optimizer(name, model)
        for _ in range(task.steps):
            before = loss()
            before.backward()
            optimizer.step()
            optimizer.zero_grad()
            report.losses.append(_value(before))
        # Before the last forward, which leaves FSDP2's parameters whole until a backward.
        report.shards = _shards(model)
        report.losses.append(_value(loss()))
    except Exception as e:
        report.error = f"{type(e).__name__}: {e}"
    # Outside the try: if ranks cannot even compare notes, this side is over.
    return _summary(_gather(report))


@dataclass
class _Report:
    """One rank's part of a row."""

    error: str = ""
    losses: list[float] = field(default_factory=list)
    shards: dict[Any, torch.Tensor] = field(default_factory=dict)


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == BY_HAND:
        return SRSGD(model.parameters())
    import torchao.optim
    import torchao.optim.adam

    cls = torchao.optim.adam._AdamW if name == "_AdamW" else getattr(torchao.optim, name)
    return cls(model.parameters(), lr=2e-3, bf16_stochastic_round=True)


def _value(loss: torch.Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def _shards(model: torch.nn.Module) -> dict[Any, torch.Tensor]:
    """This rank's shard of every parameter, under a key that exactly the ranks with a copy of that shard share.

    The key is the rank's place on the mesh dims that cut the parameter. Dims along which it is copied do not count,
    and a mesh dim that the parameter does not live on (the TP dim, for a module outside the TP plan) is not there.
    """
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        place = p.device_mesh.get_coordinate()
        assert place is not None
        cut = tuple(c for c, placement in zip(place, p.placements, strict=True) if not placement.is_replicate())
        # Bits, so that equal NaNs are equal.
        found[name, cut] = p.to_local().detach().contiguous().view(torch.int16).flatten()
    return found


def _gather(report: _Report) -> list[_Report]:
    reports: list[Any] = [None] * WORLD
    dist.all_gather_object(reports, report)
    return reports


def _summary(reports: list[_Report]) -> Result:
    for rank, report in enumerate(reports):
        if report.error:
            everywhere = all(r.error for r in reports)
            return Result(error=report.error if everywhere else f"on rank {rank} only: {report.error}")
    copied, differing = _compare([r.shards for r in reports])
    first, final = (sum(r.losses[i] for r in reports) / WORLD for i in (0, -1))
    return Result(copied=copied, differing=differing, first_loss=first, final_loss=final)


def _compare(ranks: list[dict[Any, torch.Tensor]]) -> tuple[int, int]:
    """How many weights have copies, and of how many the copies differ."""
    copies = defaultdict(list)
    for shards in ranks:
        for key, bits in shards.items():
            copies[key].append(bits)
    together = [torch.stack(bits) for bits in copies.values() if len(bits) > 1]
    return (
        sum(bits.shape[1] for bits in together),
        sum(int((bits != bits[0]).any(dim=0).sum()) for bits in together),
    )
