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


def refuse_what_cannot_be_reduced(x: Any, spec: Any) -> None:
    """Raises where `spec`, a placement that the input has, leaves a reduction of complex numbers that is not a sum.

    The reduction has to be made before the bits are read, and there is no right one: complex numbers have no order, and
    the collectives either refuse a product or, on the way to a shard, multiply the parts one by one.
    """
    for placement in spec.placements:
        if x.dtype.is_complex and isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise RuntimeError(
                f"dtensor_ext: a complex tensor placed as {placement} cannot be viewed as another dtype: it would have "
                f"to be reduced first, and there is no {placement.reduce_op} of complex numbers over ranks"
            )


def is_a_whole_bitcast(op: Any, args: Any, kwargs: Any, inputs: Sequence[Any], output: Any) -> bool:
    """Whether every rank views whole elements, of values that are final; see `bitcast_strategy`."""
    x, dtype = args[0], args[1] if len(args) > 1 else kwargs["dtype"]
    if dtype != x.dtype and any(isinstance(p, Partial) for p in inputs[0].placements):
        refuse_what_cannot_be_reduced(x, inputs[0])
        return False
    return last_dim_keeps_its_cuts(op, args, kwargs, inputs, output)


def is_linear(op: Any, args: Any, kwargs: Any, inputs: Sequence[Any], output: Any) -> bool:
    """Whether what is left to reduce, if anything, is a sum or an average."""
    refuse_what_cannot_be_reduced(args[0], inputs[0])
    partials = [p for p in inputs[0].placements if isinstance(p, Partial)]
    return all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in partials)


@rule(
    [aten.view.dtype, prims.view_of_dtype.default],
    name="bitcast.view",
    static_args=("dtype",),
    uneven=True,
    is_valid=is_a_whole_bitcast,
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
    - Partial -> Partial only when the dtype does not change (`is_a_whole_bitcast`). A reduction does not commute with
      reading its bits: the bit pattern of a sum is not the sum of the bit patterns, and max and min order them
      otherwise.
    """
    x = args_schema[0]
    rows: list[Row] = [[ShardingPlaceholder(d), ShardingPlaceholder(d)] for d in range(len(x.shape))]
    return [*rows, [AnyPartial(), AnyPartial()]]


@rule(
    [aten.view_copy.dtype],
    name="bitcast.view_copy",
    static_args=("dtype",),
    uneven=True,
    is_valid=is_a_whole_bitcast,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_tensor_ops.py",
    reason="Core finds it by decomposition: it gathers uneven and empty shards of any dim, which a view needs not.",
)
def bitcast_copy_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """y = x.view(dtype).clone(): the rows of `view.dtype`; a copy moves no element."""
    return bitcast_strategy(op, args_schema, kwargs_schema)


@rule(
    [aten.view_copy.dtype_out],
    name="bitcast.view_copy_out",
    static_args=("dtype",),
    uneven=True,
    is_valid=is_a_whole_bitcast,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_tensor_ops.py",
    reason="Core decomposes it where the item size changes, ignores where `out` is placed, and changes its placement; "
    "for equal item sizes it has no rule.",
)
def bitcast_out_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """out.copy_(x.view(dtype)): the rows of `view.dtype`; `out` is placed as the result is.

    `out` is written where it is, so its placement decides; x is redistributed to fit, or the call is an error.
    """
    return [[y, x, y] for y, x in bitcast_strategy(op, args_schema, kwargs_schema)]


@rule(
    [aten.view_as_real.default],
    name="bitcast.view_as_real",
    uneven=True,
    is_valid=is_linear,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_view_ops.py",
    reason="Core gathers an uneven last dim, and the result no longer aliases its base; shards a strided last dim on "
    "the new one; fails on a 0-dim tensor; passes Partial product, max and min: wrong numbers.",
)
def view_as_real_strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> list[Row]:
    """
    y[..., 0] = re(x), y[..., 1] = im(x): a new last dim of size 2, whole on every rank.

    - Shard(d) -> Shard(d) for every dim of x, uneven or empty: the elements keep their rank.
    - Partial sum and avg -> the same: taking the parts is linear over the reals.
    - max, min and product are not: complex numbers have no order, and (a+bi)(c+di) mixes the parts. They are an error
      (`is_linear`).
    """
    x = args_schema[0]
    rows: list[Row] = [[ShardingPlaceholder(d), ShardingPlaceholder(d)] for d in range(len(x.shape))]
    return [*rows, [AnyPartial(), AnyPartial()]]


@rule(
    [aten.view_as_complex.default],
    name="bitcast.view_as_complex",
    uneven=True,
    torch=">=2.13",
    core_file="torch/distributed/tensor/_ops/_view_ops.py",
    reason="Core's rule excludes uneven shards: an uneven or empty shard is gathered, and the result no longer aliases "
    "its base.",
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
