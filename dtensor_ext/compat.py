"""The only file that knows torch versions, and, with `install`, the only one that touches private torch API.

Each use of private API names the versions it was seen in. When a version moves one of them, this file changes and
nothing else does.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# COMPAT(seen in 2.13): names of DTensor's rule machinery.
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import (
    _get_num_tensor_inputs,
    _SingleDimStrategyInfo,
)
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder as ShardingPlaceholder,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .registry import Row, Rule, Strategy

__all__ = ["AnyPartial", "Row", "ShardingPlaceholder", "default_shard_order", "known_true", "num_shards"]


# --- versions -----------------------------------------------------------------------------------------------------


def torch_in(versions: str) -> bool:
    """Whether the running torch satisfies e.g. ``">=2.13,<2.16"``. An empty string means every version."""
    have = torch.torch_version.TorchVersion(torch.__version__.split("+")[0])
    for part in filter(None, (p.strip() for p in versions.split(","))):
        match = re.fullmatch(r"(>=|<=|==|>|<)\s*([0-9][0-9a-z.]*)", part)
        if not match:
            raise ValueError(f'dtensor_ext: {versions!r} is not a version range such as ">=2.13,<2.16"')
        compare, want = match.groups()
        if not {
            ">=": have >= want,
            "<=": have <= want,
            "==": have == want,
            ">": have > want,
            "<": have < want,
        }[compare]:
            return False
    return True


# --- words that rules are written in --------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnyPartial:
    """In a row: whatever kind of Partial the input has. One row stands for each kind that occurs."""


def known_true(condition: Any) -> bool:
    """`condition` as a bool; False where it is symbolic and cannot be told."""
    if isinstance(condition, bool):
        return condition
    # COMPAT(seen in 2.13): documented there, in a module without a stability promise.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def num_shards(spec: Any, dim: int) -> list[int]:
    """Over how many ranks, mesh dim by mesh dim, `spec` cuts tensor dim `dim`; a strided shard cuts once more."""
    counts = []
    for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            counts.append(size)
            if isinstance(placement, _StridedShard):
                counts.append(placement.split_factor)
    return counts


def default_shard_order(spec: Any) -> bool:
    """Whether `spec` cuts its dims from the first mesh dim to the last, without strides: plain nested chunks."""
    # COMPAT(seen in 2.13): DTensorSpec.shard_order and is_default_device_order.
    if any(isinstance(p, _StridedShard) for p in spec.placements):
        return False
    return bool(spec.is_default_device_order(spec.shard_order))


# --- lowering a rule ------------------------------------------------------------------------------------------------


# A keyword that no op has. The C++ cache tells a key with keywords from one without, and cannot be cleared on other
# threads: with this in it, a thread that used the op before the rule was installed does not go on with core's decision.
_NO_KEYWORD = "dtensor_ext"


def cache_key(rule: Rule, op: torch._ops.OpOverload) -> RuntimeSchemaInfo:
    """The rule's static arguments of `op`, in the form in which DTensor's caches want them.

    Of the keyword arguments the caches compare only those that are named here, tensors too: without ``out`` a call with
    a sharded ``out`` would reuse what was decided for a replicated one.
    """
    positions, keywords = [], []
    for i, argument in enumerate(op._schema.arguments):
        if argument.name in rule.static_args or (argument.kwarg_only and "Tensor" in str(argument.type)):
            if argument.kwarg_only:
                keywords.append(argument.name)
            else:
                positions.append(i)
    lists = any("Tensor[]" in str(a.type) or "List[Tensor]" in str(a.type) for a in op._schema.arguments)
    return RuntimeSchemaInfo(
        static_argnum=min(positions, default=100), static_kwargkey=keywords or [_NO_KEYWORD], needs_pytree=lists
    )


def _placements_of(op_schema: OpSchema) -> list[Placement]:
    specs = [s.strategies[0].output_spec for s in (*op_schema.args_strategy, *op_schema.kwargs_strategy)]
    return list(dict.fromkeys(p for spec in specs for p in spec.placements))


def _fill_partials(rows: Sequence[Row], kinds: Sequence[Partial]) -> list[Row]:
    filled: list[Row] = []
    for row in rows:
        if any(isinstance(p, AnyPartial) for p in row):
            filled += [[kind if isinstance(p, AnyPartial) else p for p in row] for kind in kinds]
        else:
            filled.append(row)
    return filled


def _fill_shards(rows: Sequence[Row], strides: Sequence[Any]) -> list[Row]:
    filled: list[Row] = []
    for row in rows:
        holders = any(isinstance(p, ShardingPlaceholder) for p in row)
        filled.append([Shard(p.dim) if isinstance(p, ShardingPlaceholder) else p for p in row])
        for factor in strides if holders else ():
            filled.append(
                [_StridedShard(p.dim, split_factor=factor) if isinstance(p, ShardingPlaceholder) else p for p in row]
            )
    return filled


def fill(rows: Sequence[Row], present: Sequence[Placement], width: int) -> list[Row]:
    """Rows with concrete placements: a placeholder stands for each kind of shard, or of Partial, that is `present`.

    The row that replicates everything is true of every op and comes first.
    """
    strides = list(dict.fromkeys(p.split_factor for p in present if isinstance(p, _StridedShard)))
    partials = [p for p in present if isinstance(p, Partial)]
    replicated: Row = [Replicate()] * width
    concrete = _fill_shards(_fill_partials(rows, partials), strides)
    return [replicated, *(row for row in concrete if row != replicated)]


def _num_outputs(op: torch._ops.OpOverload) -> int:
    return sum(1 for r in op._schema.returns if "Tensor" in str(r.type))


def lower(rule: Rule, op: torch._ops.OpOverload) -> Callable[[OpSchema], OpStrategy]:
    """`rule` as core's op strategy for `op`: the one form of core that can also say what depends on the mesh.

    COMPAT(seen in 2.13): `expand_to_full_mesh_op_strategy(is_valid_strategy_cb=...)` and the attributes of OpSchema.
    """
    num_outputs = _num_outputs(op)

    def strategy(op_schema: OpSchema) -> OpStrategy:
        args, kwargs = op_schema.args_meta, op_schema.kwargs_meta
        width = num_outputs + _get_num_tensor_inputs(op_schema)
        rows = rule.strategy(op, args, kwargs)
        for row in rows:
            if len(row) != width:
                raise AssertionError(
                    f"dtensor_ext: rule {rule.name!r}: {op} has {num_outputs} outputs and {width - num_outputs} tensor "
                    f"inputs in this call, so a row has {width} placements, but got {row}"
                )
        is_valid = rule.is_valid
        meta = output_meta(op_schema) if is_valid is not None else None
        found = expand_to_full_mesh_op_strategy(
            op_schema.get_mesh_from_args(),
            op_schema,
            fill(rows, _placements_of(op_schema), width),
            output_tensor_meta=meta,
            input_index=num_outputs,
            inplace_op=is_inplace(op),
            allow_unbacked_sharding=False,
            allow_uneven_sharding=rule.uneven,
            is_valid_strategy_cb=None
            if is_valid is None
            else lambda inputs, output: is_valid(op, args, kwargs, inputs, output),
        )
        if not found.strategies:
            # Replicating everything is always a strategy, unless the placement of what is written stands against it.
            raise RuntimeError(
                f"dtensor_ext: {op} cannot leave its result where the tensor that it writes is placed ({op_schema}). "
                "Give it one that is placed as the result is, or use the variant that returns a new one."
            )
        return found

    return strategy


def is_inplace(op: torch._ops.OpOverload) -> bool:
    """Whether `op` writes its first argument, by its schema (its name can lie: ``__lshift__``)."""
    first = op._schema.arguments[0] if op._schema.arguments else None
    return bool(first and first.alias_info and first.alias_info.is_write and not first.is_out)


def output_meta(op_schema: OpSchema) -> Any:
    """Shape, stride and dtype of the global result, from running the op on fake tensors."""

    def to_spec(arg: Any) -> Any:
        if isinstance(arg, OpStrategy):
            return arg.strategies[0].output_spec
        if isinstance(arg, (list, tuple)):
            return type(arg)(to_spec(a) for a in arg)
        return arg

    plain = OpSchema(
        op_schema.op,
        tuple(to_spec(a) for a in op_schema.args_schema),
        {k: to_spec(v) for k, v in op_schema.kwargs_schema.items()},
        schema_info=op_schema.schema_info,
    )
    # COMPAT(seen in 2.13)
    return DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached(plain)


# --- DTensor's tables and caches ------------------------------------------------------------------------------------


def tables() -> dict[str, dict[Any, Any]]:
    """DTensor's tables of rules, by name. COMPAT(seen in 2.13)."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return {
        name: getattr(propagator, name)
        for name in (
            "op_to_rules",
            "op_strategy_funcs",
            "op_single_dim_strategy_funcs",
            "op_to_schema_info",
            "op_to_schema_info_for_single_dim_strategy",
        )
    }


def entries(rule: Rule, op: torch._ops.OpOverload) -> dict[str, Any]:
    """What the tables hold for `op` once `rule` is installed; a table that is not named holds nothing for it.

    A rule whose validity does not depend on the mesh is registered in core's single-mesh-dim form, which core
    expands by searching; the other goes in as an op strategy. Both are core's own forms.
    """
    info = cache_key(rule, op)
    if rule.is_valid is None:
        strategy = _SingleDimStrategyInfo(
            func=_without_any_partial(rule), allow_unbacked_sharding=False, allow_uneven_sharding=rule.uneven
        )
        found: dict[str, Any] = {"op_single_dim_strategy_funcs": strategy}
        table = "op_to_schema_info_for_single_dim_strategy"
    else:
        found = {"op_strategy_funcs": lower(rule, op)}
        table = "op_to_schema_info"
    found[table] = info
    return found


def _without_any_partial(rule: Rule) -> Strategy:
    """`rule`'s strategy with a row for each of core's reductions in place of AnyPartial, which core does not know."""

    def strategy(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
        kinds = [Partial(reduction) for reduction in Partial.ALL_REDUCE_OPS]
        return _fill_partials(rule.strategy(op, args, kwargs), kinds)

    return functools.update_wrapper(strategy, rule.strategy)


def clear_sharding_caches() -> None:
    """Forget every sharding decision taken so far: in Python on every thread, in C++ on this one.

    COMPAT(seen in 2.13): the Python cache is one `lru_cache` a thread behind a `threading.local`; a new object is the
    only way to reach other threads'. The C++ cache is one a thread too, and other threads' cannot be reached: see
    `cache_key` for why they do not go on with decisions of core's. A rule that replaces another rule of ours for the
    same op is not seen by a thread that has used that op for the same arguments before.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


# --- meshes and shards ----------------------------------------------------------------------------------------------


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or `mesh` itself. COMPAT(seen in 2.13)."""
    return mesh._get_root_mesh()


def is_shard(placement: Placement) -> bool:
    """Whether `placement` cuts the tensor, with or without strides. COMPAT(seen in 2.13): _StridedShard."""
    return isinstance(placement, (Shard, _StridedShard))


def is_simulation() -> bool:
    """Whether one process plays all ranks. COMPAT(seen in 2.13): torch.distributed._local_tensor."""
    from torch.distributed._local_tensor import local_tensor_mode

    return local_tensor_mode() is not None


def shard_sizes(placement: Any, size: int, count: int) -> set[int]:
    """The sizes of the `count` shards of a dim of `size`. COMPAT(seen in 2.13): _local_shard_size_and_offset."""
    factor: Any = placement.split_factor if isinstance(placement, _StridedShard) else 1
    if size % (count * factor) == 0:
        return {size // count}
    return {int(placement._local_shard_size_and_offset(size, count, rank)[0]) for rank in range(count)}


def possible_local_shapes(x: DTensor) -> set[tuple[int, ...]]:
    """The shapes that a shard of `x` has on one rank or another, and perhaps a few more."""
    cuts: list[list[tuple[Any, int]]] = [[] for _ in x.shape]
    placements: Sequence[Any] = x.placements
    for mesh_dim, placement in enumerate(placements):
        if is_shard(placement):
            cuts[placement.dim].append((placement, x.device_mesh.size(mesh_dim)))
    sizes: list[set[int]] = []
    for size, dim_cuts in zip(x.shape, cuts, strict=True):
        possible = {int(size)}
        for placement, count in dim_cuts:
            possible = {n for s in possible for n in shard_sizes(placement, s, count)}
        sizes.append(possible)
    return set(itertools.product(*sizes))


# --- views that a compiled function returns ---------------------------------------------------------------------------


def replays_bitcasts(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, AOTAutograd's ``gen_alias_from_base``, which also makes a bitcast of a DTensor from its base.

    A compiled function that returns a view of an input returns it as a view made anew. For a DTensor the only means is
    ``as_strided``, which knows no dtype and which DTensor refuses. Where the same call as outside the compiled function
    gives what was traced, in every respect, that is the view. COMPAT(seen in 2.13): its signature.
    """

    @functools.wraps(original)
    def gen_alias_from_base(base: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(base, DTensor) and isinstance(target, DTensor) and base.dtype != target.dtype:
            bitcast = _bitcast(base, target.dtype)
            if bitcast is not None and _layout(bitcast) == _layout(target):
                return bitcast
        return original(base, target, *args, **kwargs)

    return gen_alias_from_base


def _bitcast(x: DTensor, dtype: torch.dtype) -> Any:
    """``x.view(dtype)``, or None where it does not exist."""
    try:
        return x.view(dtype)
    except RuntimeError:
        return None


def _layout(x: DTensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.placements, x._local_tensor.shape, x._local_tensor.stride()


# --- the compile cache ----------------------------------------------------------------------------------------------


def cache_hash(x: DTensor, core: str) -> str:
    """`core`, core's key of `x` in the on-disk AOTAutograd cache, with what a traced graph depends on besides.

    - This rank's coordinate: a redistribution to Shard, an uneven shard's shape and an offset are traced as constants.
    - The local tensor: its class and, for a subclass, what it is made of; otherwise its shape, stride and dtype.

    Ranks that lower to the same code still share it: that code is cached again, one level down, under the graph itself.
    COMPAT(seen in 2.13): `_stable_hash_for_caching`, `_local_tensor`.
    """
    local = x._local_tensor
    parts = (core, x.device_mesh.get_coordinate(), x.device.type, _describe(local))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _describe(x: Any) -> Any:
    """What a graph traced over tensor `x` may depend on, as plain data with a stable repr."""
    if not isinstance(x, torch.Tensor):
        return repr(x)
    name = f"{type(x).__module__}.{type(x).__qualname__}"
    meta = (tuple(x.shape), str(x.dtype), x.layout == torch.strided and tuple(x.stride()), x.requires_grad)
    if isinstance(x, DTensor):
        return name, x._stable_hash_for_caching()
    if is_traceable_wrapper_subclass(x):
        inner, context = x.__tensor_flatten__()
        return name, meta, repr(context), [(n, _describe(getattr(x, n))) for n in inner]
    return name, meta
