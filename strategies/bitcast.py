"""Bitcasts: the same bytes read as another dtype.

``view.dtype`` and its kin reinterpret memory. With ``r`` the ratio of the two item sizes, the last dim grows
or shrinks by ``r`` and every other dim is untouched, so the last dim of the *wider* type is the unit: each of
its elements must live whole on one rank. Shardy states the same for ``bitcast_convert`` (the minor dim of the
narrower type needs replication unless the sizes match).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from dtensor_ext.compat import (
    AnyPartial,
    Row,
    ShardingPlaceholder,
    default_shard_order,
    known_true,
    num_shards,
)
from dtensor_ext.registry import rule

aten = torch.ops.aten
prims = torch.ops.prims


def chunk_sizes(size: int, counts: Sequence[int]) -> list[int]:
    """Sizes of all shards of a dim of `size`, split as ``torch.chunk`` does over `counts` ranks in turn."""
    if not counts:
        return [size]
    count, *rest = counts
    step = -(-size // count)
    return [s for i in range(count) for s in chunk_sizes(min(step, max(0, size - i * step)), rest)]


def last_dim_keeps_its_cuts(op: Any, args: Any, kwargs: Any, inputs: Sequence[Any], output: Any) -> bool:
    """Whether a sharded last dim is cut at the same bytes before and after the view.

    With ``r`` narrow elements in one wide element, the cuts of the wide side, times ``r``, must be the cuts that
    DTensor makes on the narrow side by itself. They are whenever the wide size divides evenly by the number of
    shards, whatever their order. An uneven dim has to be looked at: 5 wide elements over 2 ranks are cut at 3,
    but the 20 bytes of a 4-byte type are cut at 10, not at 12.
    """
    before, after = inputs[0], output
    ndim = len(before.shape)
    if ndim == 0 or before.shape[-1] is after.shape[-1]:
        return True
    counts = num_shards(before, ndim - 1)
    if not counts:
        return True
    narrow, wide = max(before.shape[-1], after.shape[-1]), min(before.shape[-1], after.shape[-1])
    total = 1
    for n in counts:
        total *= n
    if known_true(wide % total == 0):
        return True
    if not (isinstance(wide, int) and isinstance(narrow, int) and default_shard_order(before)):
        return False
    if wide == 0:
        return True
    ratio = narrow // wide
    return [s * ratio for s in chunk_sizes(wide, counts)] == chunk_sizes(narrow, counts)


@rule(
    [aten.view.dtype, prims.view_of_dtype.default],
    name="bitcast.view",
    static_args=("dtype",),
    uneven=True,
    is_valid=last_dim_keeps_its_cuts,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_tensor_ops.py",
    reason="Core lets every placement through and leaves the dtype out of the cache key: sums of bit patterns, "
    "wrong global shapes, raw kernel errors. prims.view_of_dtype has no rule.",
)
def bitcast_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """
    y = x.view(dtype): element i of y is made of the bytes of one element of x, or of r neighbours in the last dim.

    - Shard(d), d not the last dim -> Shard(d): the bytes of a row stay together; any cut of d holds, uneven or empty.
    - Shard(last) -> Shard(last): with equal item sizes the view is pointwise. Otherwise it holds where no wide
      element is cut and both sides are cut at the same bytes (`last_dim_keeps_its_cuts`, asked with the mesh).
    - Partial -> Partial only when the dtype does not change. A reduction does not commute with reading its bits:
      the bit pattern of a sum is not the sum of the bit patterns, and max and min order them otherwise.
    """
    x, dtype = args_schema[0], args_schema[1]
    rows: list[Row] = [[ShardingPlaceholder(d), ShardingPlaceholder(d)] for d in range(len(x.shape))]
    if dtype == x.dtype:
        rows.append([AnyPartial(), AnyPartial()])
    return rows


@rule(
    [aten.view_copy.dtype],
    name="bitcast.view_copy",
    static_args=("dtype",),
    uneven=True,
    is_valid=last_dim_keeps_its_cuts,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_tensor_ops.py",
    reason="Core finds it by decomposition into view.dtype and inherits its faults.",
)
def bitcast_copy_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """y = x.view(dtype).clone(): the rows of `view.dtype`; a copy moves no element."""
    return bitcast_strategy(op, args_schema, kwargs_schema)


@rule(
    [aten.view_copy.dtype_out],
    name="bitcast.view_copy_out",
    static_args=("dtype",),
    uneven=True,
    is_valid=last_dim_keeps_its_cuts,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_tensor_ops.py",
    reason="Core finds it by decomposition into view.dtype and inherits its faults.",
)
def bitcast_out_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """out.copy_(x.view(dtype)): the rows of `view.dtype`; `out` is placed as the result is."""
    return [[y, x, y] for y, x in bitcast_strategy(op, args_schema, kwargs_schema)]


@rule(
    [aten.view_as_real.default],
    name="bitcast.view_as_real",
    uneven=True,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_view_ops.py",
    reason="TBD",
)
def view_as_real_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """
    y[..., 0] = re(x), y[..., 1] = im(x): a new last dim of size 2, whole on every rank.

    - Shard(d) -> Shard(d) for every dim of x, uneven or empty: the elements keep their rank.
    - Partial sum and avg -> the same: taking the parts is linear over the reals.
    - max, min and product are not: complex numbers have no order, and (a+bi)(c+di) mixes the parts.
    """
    x = args_schema[0]
    rows: list[Row] = [[ShardingPlaceholder(d), ShardingPlaceholder(d)] for d in range(len(x.shape))]
    return [*rows, [Partial("sum"), Partial("sum")], [Partial("avg"), Partial("avg")]]


@rule(
    [aten.view_as_complex.default],
    name="bitcast.view_as_complex",
    uneven=True,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_view_ops.py",
    reason="TBD",
)
def view_as_complex_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """
    y[...] = x[..., 0] + i x[..., 1]: the last dim, of size 2, is used up and must be whole.

    - Shard(d) -> Shard(d) for every dim but the last, uneven or empty.
    - Partial sum and avg -> the same: the map is linear over the reals; max, min and product do not commute.
    """
    x = args_schema[0]
    rows: list[Row] = [[ShardingPlaceholder(d), ShardingPlaceholder(d)] for d in range(len(x.shape) - 1)]
    rows += [[Partial("sum"), Partial("sum")], [Partial("avg"), Partial("avg")]]
    return rows or [[Replicate(), Replicate()]]
