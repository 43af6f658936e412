"""Which shard a random draw belongs to.

A helper that rounds stochastically asks torch for random numbers of some size. Two kinds of helper exist, and they
want opposite things. One draws the **global** shape: every rank must draw the same numbers, of which each takes its
slice. The other unwraps the DTensor and draws the **local** shape: ranks that hold copies of a shard must draw the
same numbers, other ranks independent ones.

The size tells them apart. A `Plan` knows the global and the local shapes of the parameters at hand and answers, for a
size, over how many shards the draw is split and which of them this rank is. One rule stands above all: a draw may
depend only on mesh dims along which no parameter that it could belong to is replicated, so copies never differ. Where
sizes do not tell, that leaves fewer dims, at worst none; then shards share one noise, which is still unbiased.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import compat

Size = tuple[int, ...]
# (number of shards, this rank's index among them)
Share = tuple[int, int]
# Mesh dims along which draws may differ; no mesh: none.
Dims = tuple[DeviceMesh | None, frozenset[int]]

WHOLE: Share = (1, 0)
NOWHERE: Dims = (None, frozenset())

UNKNOWN, GLOBAL, LOCAL = "unknown", "global", "local"


def _common(all_dims: Iterable[Dims]) -> Dims:
    """The dims that are in all; none if they belong to different meshes."""
    found = list(all_dims)
    if not found or len({mesh for mesh, _ in found}) != 1:
        return NOWHERE
    return found[0][0], frozenset.intersection(*(dims for _, dims in found))


def share(dims: Dims) -> Share:
    """This rank's place among the shards that `dims` cut."""
    mesh, cut = dims
    if mesh is None or not cut or compat.is_simulation():
        return WHOLE
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return WHOLE
    count, index = 1, 0
    for d in sorted(cut):
        count, index = count * mesh.size(d), index * mesh.size(d) + coordinate[d]
    return count, index


def dims_of(x: DTensor) -> Dims:
    """The mesh dims along which `x` is sharded."""
    return x.device_mesh, frozenset(i for i, p in enumerate(x.placements) if compat.is_shard(p))


class Plan:
    """What is known of the tensors of a region: their meshes, and the shards that each size may stand for.

    Everything here follows from global shapes and placements, so it is the same on all ranks that hold them.
    """

    def __init__(self, tensors: Sequence[Any], meshes: Iterable[DeviceMesh] = (), kind: str = UNKNOWN) -> None:
        self.kind = kind
        self._global: dict[Size, set[Dims]] = {}
        self._local: dict[Size, set[Dims]] = {}
        every: set[Dims] = set()
        found = dict.fromkeys(meshes)
        for x in tensors:
            size: Size = tuple(x.shape)
            if isinstance(x, DTensor):
                dims = dims_of(x)
                found[x.device_mesh] = None
                locals_ = compat.possible_local_shapes(x) if dims[1] else {size}
            else:
                dims, locals_ = NOWHERE, {size}
            every.add(dims)
            self._global.setdefault(size, set()).add(dims)
            for local in locals_:
                self._local.setdefault(local, set()).add(dims)
        self.meshes = frozenset(found)
        self._every = _common(every)
        self._shares = {k: self._table(k) for k in (UNKNOWN, GLOBAL, LOCAL)}

    def _dims(self, size: Size, kind: str) -> Dims:
        as_global, as_local = self._global.get(size, set()), self._local.get(size, set())
        if kind == GLOBAL or (as_global and not as_local):
            return NOWHERE
        if kind == LOCAL and as_local:
            return _common(as_local)
        return _common(as_global | as_local) if as_local else self._every

    def _table(self, kind: str) -> dict[Size, Share]:
        sizes = {*self._global, *self._local}
        return {size: share(self._dims(size, kind)) for size in sizes}

    @property
    def shares(self) -> dict[Size, Share]:
        """For each size that a parameter has, globally or locally: the share of a draw of that size."""
        return self._shares[self.kind]

    @property
    def other(self) -> Share:
        """The share of a draw of any other size."""
        return WHOLE if self.kind == GLOBAL else share(self._every)
