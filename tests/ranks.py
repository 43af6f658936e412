"""Runs a function on real gloo ranks, one process each, with time-outs everywhere."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def _entry(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple, env: dict, seconds: float):
    # The environment is set before torch or the extension is imported by `fn`'s module in this process.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds)
    )
    try:
        result = ("ok", fn(rank, world, *args))
    except BaseException:
        result = ("error", traceback.format_exc())
    torch.save(result, f"{folder}/{rank}.pt")
    # No barrier: a rank that failed must not make the others wait for it.
    os._exit(0)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    bare: bool = False,
    env: Mapping[str, str] | None = None,
    seconds: float = 90,
    check: bool = True,
) -> list[Any]:
    """``[fn(rank, world, *args) for rank in range(world)]`` on real ranks; `fn` is a module's function.

    `bare` runs them without the extension. An exception on a rank raises here, with every rank's traceback, unless
    `check` is off: then it stands in the list as text.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        child = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "OMP_NUM_THREADS": "1",
            "DTENSOR_EXT_DISABLE": "1" if bare else "0",
            **(env or {}),
        }
        saved = {k: os.environ.get(k) for k in child}
        os.environ.update(child)
        try:
            context = mp.spawn(
                _entry,
                args=(fn, world, folder, args, child, seconds),
                nprocs=world,
                join=False,
                start_method="spawn",
            )
            deadline = datetime.datetime.now() + datetime.timedelta(seconds=seconds * 3)
            while not context.join(timeout=5):
                if datetime.datetime.now() > deadline:
                    for process in context.processes:
                        process.kill()
                    raise TimeoutError(f"{fn.__name__}: the ranks did not end within {seconds * 3} s")
        finally:
            for k, v in saved.items():
                if v is None:
                    os.environ.pop(k, None)
                else:
                    os.environ[k] = v
        results = []
        for rank in range(world):
            path = Path(folder, f"{rank}.pt")
            results.append(torch.load(path, weights_only=False) if path.exists() else ("error", f"rank {rank} died"))
    if check and any(state == "error" for state, _ in results):
        text = "\n".join(f"--- rank {r}\n{value}" for r, (state, value) in enumerate(results) if state == "error")
        raise AssertionError(f"{fn.__name__} failed\n{text}")
    return [value for _, value in results]
