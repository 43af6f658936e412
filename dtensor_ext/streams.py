"""The streams of random numbers that ranks agree on.

A stream is a seed and a count of the regions that have drawn from it. There is one for each set of meshes that a
region meets. Its seed is agreed once, by one tiny all-reduce a mesh dim; from then on every rank derives what it draws
from the seed and the count, so ranks cannot drift and nothing is communicated.

How ranks agree, and why it cannot hang: the smallest of the ranks' own seeds (``torch.initial_seed()``, which draws
nothing) wins, so a run is as reproducible as its seeds are. Only the ranks of a mesh that the region holds take part.
Where a mesh is a slice of a larger one that the region does not hold (a pipeline stage, or a data-parallel slice whose
other dims carry copies), ranks that must agree might never meet there: asking them could hang, and asking only some
could let copies drift. Such a region takes a fixed seed (`manual_seed` changes it), which every rank knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import compat

Meshes = frozenset[DeviceMesh]


@dataclass
class Stream:
    """A seed, and how many regions have drawn from it."""

    name: str
    seed: int
    count: int = 0


_streams: dict[Meshes, Stream] = {}
_agreed: dict[DeviceMesh, int] = {}
_base_seed: int | None = None
_loaded: list[Stream] = []


def mesh_name(mesh: DeviceMesh) -> str:
    """What identifies a mesh in a checkpoint: device type, dims, ranks."""
    dims = ",".join(
        f"{name}={size}" if name else str(size)
        for name, size in zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, strict=True)
    )
    return f"{mesh.device_type}({dims}){mesh.mesh.flatten().tolist()}"


def _in_order(meshes: Meshes) -> list[DeviceMesh]:
    """The same order on every rank, so that collectives meet: larger meshes first, then by name."""
    return sorted(meshes, key=lambda m: (-m.size(), mesh_name(m)))


def _complete(mesh: DeviceMesh) -> bool:
    return compat.root_mesh(mesh).size() == mesh.size()


def _covering(meshes: Meshes) -> DeviceMesh | None:
    """The mesh that holds every rank that a copy of a parameter can live on, if there is one."""
    everyone = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    for mesh in _in_order(meshes):
        if _complete(mesh) and everyone <= set(mesh.mesh.flatten().tolist()):
            return mesh
    return None


def _agree(mesh: DeviceMesh, proposal: int, fixed: Stream | None) -> int:
    """The smallest proposal of the mesh's ranks. Raises on every rank alike if their fixed streams differ."""
    seed, count = (fixed.seed, fixed.count) if fixed else (-1, -1)
    value = torch.tensor([proposal, seed, -seed, count, -count], dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MIN, group=mesh.get_group(dim))
    smallest, low_seed, high_seed, low_count, high_count = value.tolist()
    if low_seed != -high_seed or low_count != -high_count:
        raise RuntimeError(
            f"dtensor_ext: the ranks of {mesh_name(mesh)} were given different random streams: seeds from {low_seed} "
            f"to {-high_seed}, counts from {low_count} to {-high_count} (-1: none). Call dtensor_ext.manual_seed or "
            "dtensor_ext.load_state_dict on every rank, with the same value."
        )
    return int(smallest)


def _users_seed() -> int:
    """This rank's own seed, as a positive number that an int64 holds."""
    return torch.initial_seed() % 2**62 + 1


def _new_stream(meshes: Meshes) -> Stream:
    name = " + ".join(mesh_name(m) for m in _in_order(meshes))
    fixed = _take_loaded(name)
    if fixed is None and _base_seed is not None:
        fixed = Stream(name, _base_seed)
    if not meshes or compat.is_simulation():
        return fixed or Stream(name, _users_seed())
    covering = _covering(meshes)
    for mesh in _in_order(meshes):
        if _complete(mesh) and mesh.get_coordinate() is not None and mesh not in _agreed:
            # A rank whose region is wider than this mesh cannot use the mesh's seed; zero tells the others.
            proposal = _users_seed() if mesh is covering else 0
            _agreed[mesh] = _agree(mesh, proposal, fixed)
    return fixed or Stream(name, _agreed.get(covering, 0) if covering is not None else 0)


def _take_loaded(name: str) -> Stream | None:
    """The saved stream of these meshes; on other meshes than it was saved on, the next one that is left."""
    for saved in _loaded:
        if saved.name == name:
            _loaded.remove(saved)
            return saved
    return Stream(name, _loaded[0].seed, _loaded.pop(0).count) if _loaded else None


def stream_of(meshes: Meshes) -> Stream:
    """The stream of these meshes. Its first use agrees on it: a collective over them, see above."""
    stream = _streams.get(meshes)
    if stream is None:
        stream = _streams[meshes] = _new_stream(meshes)
    return stream


def manual_seed(seed: int) -> None:
    """Fix the seed of every stream and start their counts anew. Call it with the same `seed` on every rank.

    Without it the ranks agree on the smallest of their ``torch.initial_seed()``. The two differ only in who chooses:
    stochastic rounding never reads or moves the user's own generators.
    """
    global _base_seed
    if not 0 <= seed < 2**63:
        raise ValueError(f"dtensor_ext.manual_seed: seed must be in [0, 2**63), got {seed}")
    _base_seed = seed
    _forget()


def _forget() -> None:
    _streams.clear()
    _agreed.clear()
    _loaded.clear()


def state_dict() -> dict[str, Any]:
    """The streams as plain data (str and int): save it with the checkpoint.

    A run that loads it draws what the uninterrupted run would have drawn. The module ``dtensor_ext`` itself is
    ``Stateful``: ``dcp.save({"model": ..., "dtensor_ext": dtensor_ext}, ...)`` saves and loads it.
    """
    saved = [*_streams.values(), *_loaded]
    return {"version": 1, "streams": [{"name": s.name, "seed": s.seed, "count": s.count} for s in saved]}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Continue from `state_dict()`'s data. Call it on every rank.

    A saved stream goes to the region over the same meshes. On other meshes (resumed on another number of ranks) saved
    streams are handed out in the order in which they were saved.

    Raises:
        ValueError: `state` is not such data. Nothing has been changed then.
    """
    try:
        if state["version"] != 1:
            raise ValueError(f"version {state['version']!r}")
        streams = [Stream(str(s["name"]), int(s["seed"]), int(s["count"])) for s in state["streams"]]
        if any(not 0 <= s.seed < 2**63 or s.count < 0 for s in streams):
            raise ValueError("a seed or count is out of range")
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"dtensor_ext.load_state_dict: not a state of dtensor_ext's streams ({e})") from e
    _forget()
    _loaded.extend(streams)
