"""What test_bitcast.py runs on each rank. Every program returns a list of faults, empty when all is right."""

from __future__ import annotations

import itertools
from typing import Any

import bitcast_sweep as sweep
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

aten = torch.ops.aten
FLOAT, BYTE = torch.float32, torch.uint8


def placed(full: torch.Tensor, mesh: Any, where: Any) -> DTensor:
    """`full` as a DTensor, from this rank's own copy of it: no communication."""
    local = sweep.local_of(full, mesh, where).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, where, run_check=False, shape=full.shape, stride=full.stride())


def outcome(f: Any) -> tuple[str, str]:
    """("ok", "") or the kind of the error and its first line."""
    try:
        f()
    except Exception as e:
        return type(e).__name__, str(e).splitlines()[0]
    return "ok", ""


def out_cases() -> list[Any]:
    shapes = [(8, 8), (5, 4), (3, 20), (8, 16)]
    dtypes = [(FLOAT, BYTE), (FLOAT, torch.int32), (BYTE, FLOAT)]
    here = [Replicate(), Shard(0), Shard(1)]
    return list(itertools.product(shapes, dtypes, here, here))


def out_variant(rank: int, world: int) -> dict:
    """view_copy(x, dtype, out=out) for every placement of x and out; the order makes stale cache entries show."""
    mesh, bad, refused = init_device_mesh("cpu", (world,)), [], []
    for shape, (src, dst), x_at, out_at in out_cases():
        label = f"{shape} {src}->{dst} {x_at} into {out_at}"
        full = sweep.tensor(shape, src)
        want = full.view(dst)
        x, out = placed(full, mesh, [x_at]), placed(torch.zeros_like(want), mesh, [out_at])
        memory = out.to_local().data_ptr()
        kind, text = outcome(lambda x=x, dst=dst, out=out: aten.view_copy.dtype_out(x, dst, out=out))
        if tuple(out.placements) != (out_at,):
            bad.append(f"{label}: out moved to {out.placements}")
        elif kind != "ok":
            refused.append(label)
            if "cannot leave its result where the tensor that it writes is placed" not in text:
                bad.append(f"{label}: {kind} {text}")
            if out.to_local().any():
                bad.append(f"{label}: wrote before the error")
        elif not sweep.same(out.to_local(), sweep.local_of(want, mesh, [out_at])):
            bad.append(f"{label}: wrong bytes")
        elif out.to_local().data_ptr() != memory:
            bad.append(f"{label}: out's memory was left")
        meta = out._spec.tensor_meta
        if (tuple(meta.shape), meta.stride, meta.dtype) != (tuple(want.shape), want.stride(), dst):
            bad.append(f"{label}: metadata {meta}")
        wrong = placed(torch.zeros(want.shape, dtype=torch.int64), mesh, [out_at])
        plain = outcome(
            lambda full=full, dst=dst, want=want: aten.view_copy.dtype_out(
                full, dst, out=torch.zeros(want.shape, dtype=torch.int64)
            )
        )
        ours = outcome(lambda x=x, dst=dst, wrong=wrong: aten.view_copy.dtype_out(x, dst, out=wrong))
        # The dtypes in the text are named as the op's meta function names them.
        if ours[0] != plain[0] or not all(
            text.startswith("Expected out tensor to have dtype") for _, text in (ours, plain)
        ):
            bad.append(f"{label}: an out of the wrong dtype gives {ours}, plain {plain}")
    return {"count": len(out_cases()), "bad": bad, "refused": refused}


def out_partial(rank: int, world: int) -> list[str]:
    """A sum that is still to be made is made first; an `out` that is a sum is refused, its bytes untouched."""
    mesh, bad = init_device_mesh("cpu", (world,)), []
    local = torch.full((4, 8), float(rank + 1))
    x = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    total = torch.full((4, 8), float(sum(range(1, world + 1))))
    out = placed(torch.zeros(4, 8, dtype=torch.int32), mesh, [Replicate()])
    aten.view_copy.dtype_out(x, torch.int32, out=out)
    if not torch.equal(out.to_local(), total.view(torch.int32)):
        bad.append("the bits of a part, not of the sum")
    out = DTensor.from_local(torch.zeros(4, 8, dtype=torch.int32), mesh, [Partial()], run_check=False)
    kind, text = outcome(lambda: aten.view_copy.dtype_out(x, torch.int32, out=out))
    if kind == "ok" or "cannot leave its result" not in text or out.to_local().any():
        bad.append(f"an out that is a sum: {kind} {text}")
    return bad


def errors(rank: int, world: int) -> list[str]:
    """Calls that plain torch refuses, on uneven and empty shards: the same kind of error on every rank."""
    mesh, seen = init_device_mesh("cpu", (world,)), []
    calls = [
        (torch.zeros(5, 3, dtype=BYTE), lambda t: t.view(FLOAT)),
        (torch.zeros(2, 6, dtype=BYTE), lambda t: t.view(FLOAT)),
        (torch.zeros((), dtype=FLOAT), lambda t: t.view(BYTE)),
        (torch.zeros(2, 3), torch.view_as_complex),
        (torch.zeros(2), torch.view_as_real),
        (torch.zeros(4, 2, dtype=torch.int32), torch.view_as_complex),
    ]
    for full, call in calls:
        plain, text = outcome(lambda full=full, call=call: call(full))
        for where in [Replicate(), *(Shard(d) for d in range(full.ndim))]:
            kind, ours = outcome(lambda full=full, call=call, where=where: call(placed(full, mesh, [where])))
            if plain == "ok" or kind != plain or text not in ours:
                seen.append(f"{tuple(full.shape)} {where}: {kind} {ours}; plain: {plain} {text}")
    return seen


def submesh(rank: int, world: int) -> list[str]:
    """A mesh of two of the ranks: the others call too, get the same metadata, and nothing waits for them."""
    mesh, bad = DeviceMesh("cpu", [1, 3]), []
    inside = mesh.get_coordinate() is not None
    cases = [
        ((5, 8), FLOAT, BYTE, "view.dtype"),
        ((5, 8), FLOAT, BYTE, "view_copy.dtype"),
        ((2, 6), BYTE, torch.int16, "prims.view_of_dtype"),
        ((3, 5), torch.complex64, None, "view_as_real"),
        ((3, 5, 2), FLOAT, None, "view_as_complex"),
        ((3, 5), FLOAT, torch.float64, "view.dtype"),
    ]
    for shape, src, dst, name in cases:
        wide = (*shape[:-1], shape[-1] * 2) if dst == torch.float64 else shape
        full = sweep.tensor(wide, src)
        want = sweep.call(sweep.OPS[name], full, dst)
        for where in [Replicate(), Shard(0), Shard(1)]:
            local = sweep.local_of(full, mesh, [where]).contiguous() if inside else torch.empty(0, dtype=src)
            x = DTensor.from_local(local, mesh, [where], run_check=False, shape=full.shape, stride=full.stride())
            got = sweep.call(sweep.OPS[name], x, dst)
            if (got.shape, got.stride(), got.dtype) != (want.shape, want.stride(), want.dtype):
                bad.append(f"{name} {shape} {where}: {got.shape} {got.stride()} {got.dtype}")
            if inside and not sweep.same(got.to_local(), sweep.local_of(want, mesh, got.placements)):
                bad.append(f"{name} {shape} {where}: wrong local")
    return bad


def transposed(rank: int, world: int) -> list[str]:
    """A transposed tensor: the same result as plain, or plain's error."""
    mesh, bad = init_device_mesh("cpu", (world,)), []
    for shape, src, dst in [((8, 12), FLOAT, torch.int32), ((5, 12), FLOAT, BYTE), ((8, 12), torch.complex64, None)]:
        full = sweep.tensor(shape, src)
        for where in [Replicate(), Shard(0), Shard(1)]:
            x = placed(full, mesh, [where]).t()
            view = (lambda t, dst=dst: t.view(dst)) if dst else torch.view_as_real
            plain, text = outcome(lambda full=full, view=view: view(full.t()))
            kind, ours = outcome(lambda x=x, view=view: view(x))
            if plain != kind or text not in ours:
                bad.append(f"{shape} {src}->{dst} {where}: {kind} {ours}; plain: {plain} {text}")
            elif plain == "ok":
                got, want = view(x), view(full.t())
                if got.stride() != want.stride():
                    bad.append(f"{shape} {src}->{dst} {where}: stride {got.stride()}, plain {want.stride()}")
                if not sweep.same(got.to_local(), sweep.local_of(want, mesh, got.placements)):
                    bad.append(f"{shape} {src}->{dst} {where}: wrong local")
    return bad


def same_compiled(rank: int, world: int, backends: list[str]) -> list[str]:
    """Compiled programs against the same programs uncompiled on plain tensors."""
    mesh, bad = init_device_mesh("cpu", (world,)), []

    def rounded(t: torch.Tensor) -> torch.Tensor:
        bits = t.view(torch.int32)
        return ((bits + 0x8000) & -0x10000).view(FLOAT).to(torch.bfloat16)

    def swapped(t: torch.Tensor) -> torch.Tensor:
        return (t.view(BYTE) ^ 255).view(FLOAT) * 1

    def complex_product(t: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(t.view(t.shape[0], -1, 2))
        return torch.view_as_real(pairs * pairs) + 0

    for backend, program in itertools.product(backends, (rounded, swapped, complex_product)):
        for shape, where in [((8, 8), Shard(0)), ((5, 8), Shard(0)), ((8, 8), Replicate())]:
            torch._dynamo.reset()
            full = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            got = torch.compile(program, backend=backend, fullgraph=True)(placed(full, mesh, [where]))
            want = program(full)
            if (got.shape, got.stride(), got.dtype) != (want.shape, want.stride(), want.dtype):
                bad.append(f"{backend} {program.__name__} {shape} {where}: {got.shape} {got.stride()} {got.dtype}")
            # A complex product rounds by how the kernel vectorizes the shard; the others move bits.
            tolerance = 1e-6 if program is complex_product else 0.0
            if not torch.allclose(got.full_tensor(), want, rtol=tolerance, atol=tolerance, equal_nan=True):
                bad.append(f"{backend} {program.__name__} {shape} {where}: wrong values")
    return bad


def returned_views(rank: int, world: int, backend: str) -> dict:
    """A compiled function that returns a bitcast of its input: the view, its placement and its memory as uncompiled."""
    mesh, bad, count = init_device_mesh("cpu", (world,)), [], 0
    for src, dst in [(FLOAT, BYTE), (BYTE, FLOAT), (FLOAT, torch.bfloat16)]:

        def program(t: torch.Tensor, dst: torch.dtype = dst) -> torch.Tensor:
            return t.view(dst)

        for shape in [(8, 32), (3, 20), (16,)]:
            for where in [Replicate(), *(Shard(d) for d in range(len(shape)))]:
                label, count = f"{backend} {shape} {src}->{dst} {where}", count + 1
                torch._dynamo.reset()
                full = sweep.tensor(shape, src)
                want, x = full.view(dst), placed(full, mesh, [where])
                try:
                    eager = program(x)
                    got = torch.compile(program, backend=backend, fullgraph=True)(x)
                except Exception as e:
                    bad.append(f"{label}: {type(e).__name__} {str(e).splitlines()[0]}")
                    continue
                if (got.shape, got.stride(), got.dtype) != (want.shape, want.stride(), want.dtype):
                    bad.append(f"{label}: {got.shape} {got.stride()} {got.dtype}")
                if got.placements != eager.placements:
                    bad.append(f"{label}: {got.placements}, uncompiled {eager.placements}")
                if not sweep.same(got.to_local(), sweep.local_of(want, mesh, got.placements)):
                    bad.append(f"{label}: wrong bytes")
                if eager.placements == x.placements and x.to_local().numel():
                    got.zero_()
                    if x.to_local().view(BYTE).any():
                        bad.append(f"{label}: a write through the view is lost")
    return {"count": count, "bad": bad}


def several(rank: int, world: int, names: list[str]) -> dict:
    """The programs of these names, one after the other: one start of the ranks for all."""
    return {name: globals()[name](rank, world) for name in names}
