"""Trains a small bf16 model on four CPU processes in every row of a matrix: low-bit optimizers and one written by hand,
under FSDP2, HSDP, FSDP2 with tensor parallelism, and plain distribute_tensor. Each row runs on bare PyTorch and with
the extension. Ranks are seeded differently on purpose: stochastic rounding must not make copies of a weight differ.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .demo_layouts import WORLD
from .demo_ranks import Task, work
from .demo_rows import OPTIMIZERS, Result, Row, complaint, matrix, table, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    parser.add_argument("--steps", type=_positive, default=20, help="training steps of each row (default: 20)")
    parser.add_argument("--seed", type=_positive, default=1234, help="rank r is seeded with this + r (default: 1234)")
    parser.add_argument("--compile", action="store_true", help="run torchao's steps as it compiles them; much slower")
    parser.add_argument("--only", default="", metavar="NAME", help="only optimizers whose name contains NAME")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def demo(steps: int, seed: int, compiled: bool, only: str) -> int:
    """Run the demo and print its table. Returns 0 if every row that was tried passed with the extension."""
    rows = matrix(only)
    if not rows:
        print(
            f"dtensor-ext demo: no optimizer's name contains {only!r}: take from {', '.join(OPTIMIZERS)}",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    print(_header(steps, seed, compiled), flush=True)
    bare = _side(rows, steps, seed, compiled, extended=False)
    extended = _side(rows, steps, seed, compiled, extended=True)
    print(f"\n{table(rows, bare, extended)}\n")
    for row, result in zip(rows, extended, strict=True):
        if complaint(result):
            print(f"FAILED with dtensor_ext: {', '.join(row)}: {complaint(result)}")
    code = verdict(extended)
    print(f"{'FAILED' if code else 'Passed'} in {time.monotonic() - began:.0f} s.")
    return code


def _header(steps: int, seed: int, compiled: bool) -> str:
    how = (
        "torchao's optimizers run as it compiles them (--compile)."
        if compiled
        else 'Eager: torch.compiler.set_stance("force_eager"), since torchao compiles its step by itself.'
    )
    return (
        f"{WORLD} gloo ranks on the CPU, seeded {seed} + rank; a bf16 MLP, {steps} steps a row.\n"
        f"{how}\n"
        "copies: weights that several ranks hold, compared bit by bit after the last step."
    )


def _side(rows: list[Row], steps: int, seed: int, compiled: bool, extended: bool) -> list[Result]:
    """Every row on one side, in one set of processes."""
    title = "with dtensor_ext" if extended else "bare PyTorch"
    print(f"\n{title}:", flush=True)
    with tempfile.TemporaryDirectory(prefix="dtensor-ext-demo-") as folder:
        task = Task(rows, steps, seed, compiled, extended, folder, seconds=300 if compiled else 60)
        env = {
            "DTENSOR_EXT_DISABLE": "0" if extended else "1",
            # Code that an earlier run compiled, on the other side too, must not be found.
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "OMP_NUM_THREADS": "1",
        }
        # Longer than a collective's time-out, so that ranks report it themselves; the first row starts up besides.
        patience = 60 + 2 * task.seconds + steps
        found: list[Result] = []
        with _ranks(task, env) as (processes, results):
            for row in rows:
                result = _next(results, processes, patience)
                if result is None:
                    break
                print(f"  {len(found) + 1}/{len(rows)}  {', '.join(row)}: {', '.join(result.cells)}", flush=True)
                found.append(result)
            else:
                for process in processes:
                    process.join(timeout=task.seconds)
        if len(found) < len(rows):
            print(_logs(folder), flush=True)
        return found + [Result(error="the ranks stopped before this row")] * (len(rows) - len(found))


@contextlib.contextmanager
def _ranks(task: Task, env: Mapping[str, str]) -> Iterator[tuple[list[Any], Any]]:
    """The ranks' processes and the queue that rank 0 puts results into. None is left running afterwards."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, task, results)) for rank in range(WORLD)]
    # A spawned process takes the environment of the moment that it is started in.
    saved = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    try:
        for process in processes:
            process.start()
    finally:
        for key, value in saved.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    try:
        yield processes, results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _next(results: Any, processes: list[Any], seconds: float) -> Result | None:
    """The next row's result; None if a rank has died or nothing comes for so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # Asked before waiting: what a rank has put before its end is still taken.
        died = any(p.exitcode for p in processes)
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1)
        if died:
            break
    return None


def _logs(folder: str) -> str:
    """The ends of what the ranks have printed."""
    tails = []
    for path in sorted(Path(folder).glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        tails.append("\n".join([f"--- rank {path.stem}", *lines[-15:]]))
    return "\n".join(tails)
