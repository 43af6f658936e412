"""Every bitcast on real ranks against the plain op: values, shape, stride, dtype, placement, aliasing, errors."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

if os.environ.get("DTENSOR_EXT_DISABLE") != "1":
    import dtensor_ext  # noqa: F401

# The sweep provokes errors on purpose; torch logs each of them on the way.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

aten, prims = torch.ops.aten, torch.ops.prims
DTYPES = [
    torch.uint8,
    torch.float8_e4m3fn,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
ALL_PAIRS = list(itertools.product(DTYPES, DTYPES))
# Narrower, wider, by 2, 4 and 8, the same size, the same dtype, and a complex one.
PAIRS = [
    (torch.float32, torch.uint8),
    (torch.uint8, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.int32),
    (torch.float32, torch.float32),
    (torch.uint8, torch.complex64),
    (torch.complex64, torch.bfloat16),
]
SHAPES = [(8, 8), (8, 16), (5, 4), (3, 40), (2, 6, 8), (1, 4), (0, 4), (4, 0), (16,), (20,), (5,), (7, 3), ()]


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Distinct bytes, reproducible on every rank."""
    count = 1
    for s in shape:
        count *= s
    g = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=g)
    return raw.view(dtype).reshape(shape) if shape else raw.view(dtype)[0].clone()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.contiguous(), b.contiguous()
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def placements(mesh_ndim: int, ndim: int) -> list[tuple]:
    one = [Replicate(), *(Shard(d) for d in range(ndim))]
    combos = list(itertools.product(one, repeat=mesh_ndim))
    if mesh_ndim == 2 and ndim:
        combos += [(_StridedShard(d, split_factor=2), Shard(d)) for d in range(ndim)]
    return combos


def local_of(full: torch.Tensor, mesh: Any, where: Any) -> torch.Tensor:
    """What this rank holds of `full`, by core's own split of plain tensors."""
    out = full
    for dim, p in enumerate(where):
        if isinstance(p, (Shard, _StridedShard)):
            n, k = mesh.size(dim), mesh.get_local_rank(dim)
            pieces, _ = p._split_tensor(out, n, with_padding=False, contiguous=False)
            out = pieces[k]
    return out


def cuts_last_dim(shape: Any, where: Any) -> bool:
    return any(isinstance(p, (Shard, _StridedShard)) and p.dim == len(shape) - 1 for p in where)


def gloo_sends(x: DTensor) -> bool:
    """Whether the backend can gather this dtype at all: it cannot for float8 and int16, with any op."""
    try:
        x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    except RuntimeError as e:
        return "Invalid scalar type" not in str(e)
    return True


def call(op: Any, x: Any, dtype: Any) -> Any:
    return op(x, dtype) if dtype is not None else op(x)


OPS = {
    "view.dtype": aten.view.dtype,
    "view_copy.dtype": aten.view_copy.dtype,
    "prims.view_of_dtype": prims.view_of_dtype.default,
    "view_as_real": aten.view_as_real.default,
    "view_as_complex": aten.view_as_complex.default,
}
VIEWS = {"view.dtype", "prims.view_of_dtype", "view_as_real", "view_as_complex"}


def cases(name: str, shape: tuple[int, ...], pairs: Any) -> Any:
    if name == "view_as_real":
        return [(shape, d, None) for d in (torch.complex64, torch.complex128)]
    if name == "view_as_complex":
        return [((*shape, 2), d, None) for d in (torch.float32, torch.float64)] + [((*shape, 3), torch.float32, None)]
    return [(shape, a, b) for a, b in pairs]


def one(name: str, mesh: Any, shape: Any, src: Any, dst: Any, where: Any) -> list[str]:
    op, label, bad = OPS[name], f"{name} {tuple(mesh.shape)} {tuple(shape)} {src}->{dst} {where}", []
    full = tensor(shape, src)
    x = DTensor.from_local(
        local_of(full, mesh, where).clone(memory_format=torch.contiguous_format),
        mesh,
        where,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    try:
        want, error = call(op, full, dst), None
    except Exception as e:
        want, error = None, e
    try:
        with CommDebugMode() as comm:
            got = call(op, x, dst)
    except Exception as e:
        if error is None:
            if cuts_last_dim(shape, where) and "Invalid scalar type" in str(e) and not gloo_sends(x):
                return []
            return [f"{label}: raised {type(e).__name__}: {str(e).splitlines()[0][:120]}"]
        if not isinstance(e, type(error)) or str(error).splitlines()[0] not in str(e):
            bad.append(f"{label}: raised {e!r:.150}, plain raises {error!r:.150}")
        return bad
    if error is not None:
        return [f"{label}: no error, plain raises {error!r:.150}"]
    if tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype or got.stride() != want.stride():
        bad.append(
            f"{label}: meta {tuple(got.shape)} {got.stride()} {got.dtype}, want {tuple(want.shape)} {want.stride()}"
        )
    spec = got._spec.tensor_meta
    if tuple(spec.shape) != tuple(want.shape) or spec.dtype != want.dtype or spec.stride != want.stride():
        bad.append(f"{label}: spec {spec}")
    mine = got.to_local()
    if not same(mine, local_of(want, mesh, got.placements)):
        bad.append(f"{label}: wrong local {tuple(mine.shape)} for {got.placements}")
    kept = tuple(got.placements) == tuple(where)
    if kept and comm.get_total_counts():
        bad.append(f"{label}: communicates with the placement kept")
    whole = dst is None or src.itemsize == dst.itemsize
    free = not cuts_last_dim(shape, where)
    if name == "view_as_complex":
        whole = False
    if name == "view_as_real":
        free = True
    if (free or whole) and not kept:
        bad.append(f"{label}: became {got.placements}")
    if name in VIEWS and kept and mine.numel():
        if mine.untyped_storage().data_ptr() != x.to_local().untyped_storage().data_ptr():
            bad.append(f"{label}: no longer a view")
        else:
            got.zero_()
            if x.to_local().reshape(-1).view(torch.uint8).any():
                bad.append(f"{label}: a write through the view is lost")
    return bad


def reduced(stack: torch.Tensor, kind: str) -> torch.Tensor | None:
    """What plain torch makes of the ranks' values, stacked; None where there is no such thing."""
    if kind in ("max", "min") and stack.is_complex():
        return None
    if kind == "avg":
        return stack.mean(0)
    # Plain sums and products of small integers are int64, those over ranks are not.
    return {"sum": stack.sum, "max": stack.amax, "min": stack.amin, "product": stack.prod}[kind](0).to(stack.dtype)


def partial_case(name: str, mesh: Any, shape: Any, src: Any, dst: Any, where: Any, rank: int) -> list[str]:
    """Inputs that differ a rank; the reference reduces them in plain torch first."""
    import torch.distributed as dist

    label = f"{name} {tuple(mesh.shape)} {tuple(shape)} {src}->{dst} {where}"
    kind = next(p.reduce_op for p in where if isinstance(p, Partial))
    gens = [torch.Generator().manual_seed(100 + r) for r in range(dist.get_world_size())]
    each = [torch.randint(1, 5, shape, generator=g).to(src) for g in gens]
    if src.is_complex:
        each = [x * (1 + 2j) for x in each]
    # Over one mesh dim only; over the other the tensor is replicated: the locals agree there.
    dim = next(i for i, p in enumerate(where) if isinstance(p, Partial))
    index = mesh.get_local_rank(dim)
    members = list(range(mesh.size(dim)))
    stack = torch.stack([each[m] for m in members])
    full = reduced(stack, kind)
    local = each[index]
    for i, p in enumerate(where):
        if isinstance(p, Shard):
            local = local.chunk(mesh.size(i), p.dim)[mesh.get_local_rank(i)].contiguous()
    x = DTensor.from_local(local, mesh, where, run_check=False, shape=stack[0].shape, stride=stack[0].stride())
    want = None if full is None else call(OPS[name], full, dst)
    try:
        got = call(OPS[name], x, dst)
    except Exception as e:
        if src.is_complex and kind in ("max", "min", "product") and f"no {kind} of complex numbers" in str(e):
            return []
        return [f"{label}: raised {e!r:.200}"]
    if want is None and src != dst:
        return [f"{label}: complex numbers have no {kind}, but the result is {got.placements}"]
    bad: list[str] = []
    if src != dst and dst is not None and any(isinstance(p, Partial) for p in got.placements):
        return [f"{label}: Partial passed a change of dtype"]
    if src == dst:
        if tuple(got.placements) != tuple(where) or got.to_local().data_ptr() != local.data_ptr():
            bad.append(f"{label}: the identity view changed {where} to {got.placements}")
        return bad
    if dst is None and kind in ("sum", "avg") and tuple(got.placements) != tuple(where):
        bad.append(f"{label}: the sum was not kept: {got.placements}")
    if any(isinstance(p, Partial) for p in got.placements):
        got = got.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in got.placements])
    if not same(got.to_local(), local_of(want, mesh, got.placements)):
        bad.append(f"{label}: wrong value")
    return bad


def sweep(rank: int, world: int, meshes: list[tuple[int, ...]], pairs: Any, shapes: Any) -> dict:
    bad: list[str] = []
    count = 0
    for mesh_shape in meshes:
        mesh = init_device_mesh("cpu", mesh_shape)
        for name in OPS:
            for base in shapes:
                for shape, src, dst in cases(name, base, pairs):
                    for where in placements(mesh.ndim, len(shape)):
                        count += 1
                        bad += one(name, mesh, shape, src, dst, where)
    return {"count": count, "bad": bad}


def partials(rank: int, world: int) -> dict:
    bad: list[str] = []
    count = 0
    pairs = [
        (torch.float32, torch.int32),
        (torch.float32, torch.uint8),
        (torch.uint8, torch.float32),
        (torch.int32, torch.float32),
        (torch.float32, torch.float32),
        (torch.int64, torch.int64),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.complex64),
    ]
    for mesh_shape in [(world,), (2, world // 2)]:
        mesh = init_device_mesh("cpu", mesh_shape)
        other = [(), (Replicate(),), (Shard(0),)]
        for kind in ("sum", "avg", "max", "min", "product"):
            for rest in other:
                if len(rest) != mesh.ndim - 1:
                    continue
                for where in dict.fromkeys([(Partial(kind), *rest), (*rest, Partial(kind))]):
                    for name in ("view.dtype", "view_copy.dtype", "prims.view_of_dtype"):
                        for src, dst in pairs:
                            if kind == "avg" and not (src.is_floating_point or src.is_complex):
                                continue
                            if name == "view_copy.dtype" and src == dst:
                                continue
                            count += 1
                            bad += partial_case(name, mesh, (4, 8), src, dst, where, rank)
                    count += 2
                    bad += partial_case("view_as_complex", mesh, (4, 2), torch.float32, None, where, rank)
                    bad += partial_case("view_as_real", mesh, (4, 2), torch.complex64, None, where, rank)
    return {"count": count, "bad": bad}
