"""What the tests of the SPMD region run on each rank."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from training import (
    HELPERS,
    Sgd,
    differing_copies,
    force_eager,
    full,
    global_index,
    local,
    model,
    place,
    seeds_apart,
    set_grads,
    stream_seed,
)


def train(rank: int, world: int, layouts: list[str], helpers: list[str], steps: int) -> dict[Any, Any]:
    """Differing copies after `steps`, a layout and a helper; an exception as text."""
    seen: dict[Any, Any] = {}
    for layout in layouts:
        for helper in helpers:
            seeds_apart(rank)
            params = place(layout, world, model())
            optimizer = Sgd(params, helper=helper)
            try:
                for step in range(steps):
                    set_grads(params, step)
                    optimizer.step()
                seen[layout, helper] = differing_copies(params, rank, world)
            except RuntimeError as e:
                seen[layout, helper] = str(e)
    return seen


def results(rank: int, world: int, layouts: list[str], helpers: list[str], steps: int) -> dict[Any, Any]:
    """The full parameters after `steps` with one agreed stream."""
    seen: dict[Any, Any] = {}
    for layout in layouts:
        for helper in helpers:
            seeds_apart(rank)
            params = place(layout, world, model())
            stream_seed(5)
            optimizer = Sgd(params, helper=helper)
            for step in range(steps):
                set_grads(params, step)
                # Plain parameters on one device open no region by themselves.
                with dtensor_ext_region() if layout == "one" else nullcontext():
                    optimizer.step()
            seen[layout, helper] = [full(p) for p in params]
    return seen


def noise(rank: int, world: int, layouts: list[str], helpers: list[str], rounds: int) -> dict[Any, Any]:
    """For each layout and helper: the mean of `rounds` roundings of one tensor, whether each was a neighbour, and the
    noise bits of each shard."""
    seen: dict[Any, Any] = {}
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    where = {
        "fsdp": ((world,), [Shard(0)]),
        "columns": ((world,), [Shard(1)]),
        "hsdp": ((2, world // 2), [Replicate(), Shard(0)]),
        "two": ((2, world // 2), [Shard(0), Shard(1)]),
    }
    for layout in layouts:
        shape, placements = where[layout]
        mesh = init_device_mesh("cpu", shape)
        for name in helpers:
            seeds_apart(rank)
            d = distribute_tensor(x, mesh, placements, src_data_rank=None)
            down = (d.to_local().view(torch.int32) & 0xFFFF0000).view(torch.float32)
            up = ((d.to_local().view(torch.int32) & 0xFFFF0000) + 0x10000).view(torch.float32)
            total, ups, neighbours = torch.zeros_like(down), [], True
            for _ in range(rounds):
                with dtensor_ext_region(d):
                    y = HELPERS[name](d).to_local().float()
                neighbours &= bool(((y == down) | (y == up)).all())
                ups.append((y == up) & (up != down))
                total += y
            everyone: list[Any] = [None] * world
            dist.all_gather_object(
                everyone, (mesh.get_coordinate(), global_index(d, rank), total, torch.stack(ups[:8]))
            )
            seen[layout, name] = {
                "mean": DTensor.from_local(total / rounds, mesh, placements, run_check=False).full_tensor(),
                "neighbours": neighbours,
                "everyone": everyone,
            }
    return seen


def dtensor_ext_region(*subjects: Any) -> Any:
    import dtensor_ext

    return dtensor_ext.spmd_region(*subjects)


def generators(rank: int, world: int) -> list[str]:
    """The user's generator continues as if no step had been: also when it raises, and in a closure."""
    bad: list[str] = []
    params = place("fsdp", world, model())
    optimizer = Sgd(params)
    set_grads(params, 0)

    seeds_apart(rank)
    want = torch.rand(5)
    seeds_apart(rank)
    optimizer.step()
    if not torch.equal(torch.rand(5), want):
        bad.append("a step moved the generator")

    class Broken(Sgd):
        def step(self, closure: Any = None) -> Any:
            torch.rand(3)
            raise ValueError("broken")

    broken = Broken(params)
    seeds_apart(rank)
    try:
        broken.step()
        bad.append("no error")
    except ValueError:
        pass
    if not torch.equal(torch.rand(5), want):
        bad.append("a step that raised moved the generator")
    try:
        _ = torch.ones(params[0].shape) < params[0]
        bad.append("the operand rule stayed after a step that raised")
    except RuntimeError:
        pass

    drawn: list[Any] = []

    def closure() -> Any:
        drawn.append(torch.rand(5))
        try:
            _ = torch.ones(params[0].shape) < params[0]
            bad.append("the operand rule holds in the closure")
        except RuntimeError:
            pass
        return 1.5

    for call in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        seeds_apart(rank)
        ahead = torch.rand(10)
        seeds_apart(rank)
        drawn.clear()
        if call() != 1.5:
            bad.append("the closure's loss is lost")
        if not torch.equal(torch.cat([*drawn, torch.rand(5)]), ahead):
            bad.append("the closure does not draw from the user's generator")

    class ClosureRaises(Exception):
        pass

    def raises() -> Any:
        torch.rand(5)
        raise ClosureRaises

    seeds_apart(rank)
    try:
        optimizer.step(raises)
        bad.append("the closure's error is lost")
    except ClosureRaises:
        pass
    if not torch.equal(torch.rand(5), ahead[5:]):
        bad.append("after a closure that raised the generator is elsewhere")
    # Several closures a step, as LBFGS does.
    lbfgs = torch.optim.LBFGS([nn.Parameter(distribute_tensor(torch.ones(8), params[0].device_mesh, [Shard(0)]))])
    calls: list[Any] = []

    def objective() -> Any:
        lbfgs.zero_grad()
        calls.append(torch.rand(1))
        loss = (lbfgs.param_groups[0]["params"][0] ** 2).sum().full_tensor()
        loss.backward()
        return loss

    seeds_apart(rank)
    lbfgs.step(objective)
    drawn_there = torch.cat(calls)
    seeds_apart(rank)
    if len(calls) < 2 or not torch.equal(torch.rand(len(calls)), drawn_there):
        bad.append(f"{len(calls)} closures in a step do not draw in turn from the user's generator")
    return bad


def meshes(rank: int, world: int) -> list[str]:
    """Several meshes in one optimizer, stages, and ranks outside a mesh: nothing hangs, copies agree."""
    bad: list[str] = []

    def run(name: str, params: list[Any], check: bool = True) -> None:
        seeds_apart(rank)
        optimizer = Sgd(params)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        if check and differing_copies(params, rank, world):
            bad.append(f"{name}: copies differ")

    def parameter(mesh: DeviceMesh, where: Any, size: int = 16) -> Any:
        return nn.Parameter(distribute_tensor(torch.ones(size, 4).bfloat16(), mesh, where, src_data_rank=None))

    whole = init_device_mesh("cpu", (world,))
    two = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    run("two meshes of all ranks", [parameter(whole, [Shard(0)]), parameter(two, [Replicate(), Shard(0)])])
    run("a mesh and a slice", [parameter(two, [Shard(0), Replicate()]), parameter(two["dp"], [Replicate()], 8)])
    run("copies that no mesh knows of", [parameter(two["dp"], [Shard(0)])])

    # Pipeline stages: each rank steps its own stage; the last stage takes more steps, and the others none at all.
    stage = two.get_local_rank("pp")
    mine = [parameter(two["dp"], [Replicate()], 8 + stage)]
    run("a stage on a slice", mine, check=False)
    if stage == 1:
        run("a stage alone", [parameter(two["dp"], [Shard(0)])], check=False)

    first = DeviceMesh("cpu", list(range(world // 2)))
    second = DeviceMesh("cpu", list(range(world // 2, world)))
    own = first if rank < world // 2 else second
    seeds_apart(rank)
    params = [parameter(own, [Replicate()])]
    optimizer = Sgd(params)
    for step in range(3 if own is first else 1):
        set_grads(params, step)
        optimizer.step()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, local(params[0]).float())
    half = world // 2
    for group in (everyone[:half], everyone[half:]):
        if any(not torch.equal(group[0], other) for other in group[1:]):
            bad.append("a stage with a mesh of its own: copies differ")

    # A rank outside the mesh holds an empty shard, and may step or not.
    outside = parameter(first, [Replicate()])
    if rank != world - 1:
        optimizer = Sgd([outside])
        outside.grad = distribute_tensor(torch.ones(16, 4).bfloat16(), first, [Replicate()], src_data_rank=None)
        optimizer.step()
    return bad


def communication(rank: int, world: int) -> list[Any]:
    """Collectives in each of three steps."""
    params = place("hsdp", world, model())
    optimizer = Sgd(params)
    counts = []
    for step in range(3):
        set_grads(params, step)
        with CommDebugMode() as comm:
            optimizer.step()
        counts.append(comm.get_total_counts())
    return counts


def operands(rank: int, world: int) -> list[str]:
    """The rule for plain tensors: which, where, and what the error says."""
    import dtensor_ext

    bad: list[str] = []
    mesh = init_device_mesh("cpu", (2, world // 2))
    x = torch.arange(24.0).reshape(6, 4)
    d = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None)
    plain = torch.arange(24.0).flip(0).reshape(6, 4)

    ops = {
        "<": lambda a, b: a < b,
        "> reflected": lambda a, b: b > a,
        "lt": torch.lt,
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / (b + 1),
        "& int": lambda a, b: a.int() & b.int(),
        "^ int": lambda a, b: a.int() ^ b.int(),
        "where": lambda a, b: torch.where(a < b, a, b),
        "where kwarg": lambda a, b: torch.add(input=a, other=b),
        "maximum": torch.maximum,
        "lerp": lambda a, b: torch.lerp(a, b, 0.25),
        "addcmul": lambda a, b: torch.addcmul(a, b, b),
        "foreach_add": lambda a, b: torch._foreach_add([a, a], [b, b])[1],
        "foreach_mul": lambda a, b: torch._foreach_mul([a], [b])[0],
    }
    with dtensor_ext.spmd_region(d):
        for name, op in ops.items():
            for order in (False, True):
                if "foreach" in name and order:
                    continue
                left, right = (plain, d) if order else (d, plain)
                want = op(plain, x) if order else op(x, plain)
                got = op(left, right)
                if not isinstance(got, DTensor) or not torch.equal(got.full_tensor(), want):
                    bad.append(f"{name} (plain {'left' if order else 'right'}): wrong")
        y = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None)
        y.add_(plain)
        if not torch.equal(y.full_tensor(), x + plain):
            bad.append("add_: wrong")

    hint = "exactly the DTensor's global shape"

    def raises(name: str, f: Any, hinted: bool) -> None:
        try:
            f()
        except RuntimeError as e:
            if "mixed torch.Tensor and DTensor" not in str(e):
                bad.append(f"{name}: {e}")
            if (hint in str(e)) is not hinted:
                bad.append(f"{name}: hint {'missing' if hinted else 'outside a region'}")
        else:
            bad.append(f"{name}: accepted")

    raises("outside", lambda: d < plain, False)
    raises("outside, reflected", lambda: plain < d, False)
    with dtensor_ext.spmd_region(d):
        raises("a row that broadcasts", lambda: d + torch.ones(4), True)
        raises("a column that broadcasts", lambda: d + torch.ones(6, 1), True)
        raises("the local shape", lambda: d + torch.ones(3, 4), True)
        raises("transposed", lambda: d + torch.ones(4, 6), True)
        raises("matmul", lambda: d @ torch.ones(4, 6), True)
        raises("cat", lambda: torch.cat([d, plain]), True)
        keep = plain.clone()
        raises("plain in place", lambda: keep.add_(d), True)
        if not torch.equal(keep, plain):
            bad.append("a refused in-place op changed its tensor")
        in_trace = {
            "<": lambda t: plain < t,
            "where": lambda t: torch.where(t < plain, t, plain),
            "foreach_add": lambda t: torch._foreach_add([t, t], [plain, plain])[1],
        }
        for name, f in in_trace.items():
            got = torch.compile(f, fullgraph=True, backend="aot_eager")(d)
            if not torch.equal(got.full_tensor(), f(x)):
                bad.append(f"{name}, compiled: wrong")
        try:
            torch.compile(lambda t: t + torch.ones(4), fullgraph=True, backend="aot_eager")(d)
            bad.append("compiled, a row that broadcasts: accepted")
        except Exception as e:
            if hint not in str(e):
                bad.append(f"compiled: no hint in {e}")
        if not torch.equal((d + torch.tensor(2.0)).full_tensor(), x + 2):
            bad.append("a scalar tensor: wrong")
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.append(_error(lambda: d < plain)))
        thread.start()
        thread.join()
        if elsewhere[0] is None:
            bad.append("the rule holds on another thread")
    raises("afterwards", lambda: d < plain, False)
    return bad


def _error(f: Any) -> Any:
    try:
        f()
    except RuntimeError as e:
        return str(e)
    return None


def resume(rank: int, world: int, layout: str, steps: int, starts: dict[str, Any]) -> dict[str, Any]:
    """For each helper: train from its start (or from the beginning) for `steps`. What a checkpoint would hold then."""
    import dtensor_ext

    ends: dict[str, Any] = {}
    for helper, start in starts.items():
        seeds_apart(rank + (100 if start else 0))
        params = place(layout, world, model())
        begin = 0
        # What the helper before this one has left is no part of this run.
        dtensor_ext.load_state_dict(start["streams"] if start else {"version": 1, "streams": []})
        if start:
            begin = start["step"]
            with torch.no_grad():
                for p, value in zip(params, start["params"], strict=True):
                    p.copy_(distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None))
        optimizer = Sgd(params, helper=helper)
        for step in range(begin, begin + steps):
            set_grads(params, step)
            optimizer.step()
        ends[helper] = {
            "streams": dtensor_ext.state_dict(),
            "step": begin + steps,
            "params": [full(p) for p in params],
        }
    return ends


def different_states(rank: int, world: int, which: str) -> str:
    """One rank was given another state: the error, which every rank must see."""
    import dtensor_ext

    params = place("fsdp", world, model())
    if which == "seed":
        dtensor_ext.manual_seed(5 + (rank == 1))
    elif which == "loaded on one rank only" and rank == 1:
        dtensor_ext.load_state_dict({"version": 1, "streams": [{"name": "x", "seed": 3, "count": 7}]})
    set_grads(params, 0)
    before = torch.get_rng_state()
    weights = [local(p).clone() for p in params]
    try:
        Sgd(params).step()
    except RuntimeError as e:
        same = torch.equal(before, torch.get_rng_state()) and all(map(torch.equal, weights, map(local, params)))
        return str(e) if same else "something was changed before the error"
    return "no error"


def before_the_import(rank: int, world: int) -> list[str]:
    """Optimizers, schedulers and bound steps from before the import get the region too; afterwards it is gone."""
    import dtensor_ext

    bad: list[str] = []
    dtensor_ext.uninstall()

    class Late(Sgd):
        pass

    class Deeper(Sgd):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params = place("hsdp", world, model())
    made = {
        "an optimizer": Sgd(params, helper="local"),
        "a subclass": Late(params, helper="local"),
        "super().step()": Deeper(params, helper="local"),
    }
    scheduled = Sgd(params, helper="local")
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    made["scheduled"] = scheduled
    bound = Sgd(params, helper="local")
    steps = {name: optimizer.step for name, optimizer in made.items()}
    steps["bound"] = bound.step
    dtensor_ext.install()

    class After(Sgd):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    steps["a class made afterwards"] = After(params, helper="local").step
    for name, step in steps.items():
        seeds_apart(rank)
        before = torch.get_rng_state()
        set_grads(params, 1)
        step()
        if not torch.equal(before, torch.get_rng_state()):
            bad.append(f"{name}: the step drew from the user's generator")
    if differing_copies(params, rank, world):
        bad.append("copies differ")
    dtensor_ext.uninstall()
    for name, step in steps.items():
        seeds_apart(rank)
        before = torch.get_rng_state()
        set_grads(params, 1)
        step()
        if torch.equal(before, torch.get_rng_state()):
            bad.append(f"{name}: still in a region after uninstall")
    return bad


def torchs_own(rank: int, world: int) -> list[str]:
    """torch's optimizers, foreach and fused, give what they give on one device, in a region of their own."""
    import dtensor_ext

    bad: list[str] = []
    inside: list[bool] = []
    for name, options in [
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("Adam", {"foreach": False}),
        ("Adagrad", {}),
    ]:
        reference = [nn.Parameter(p.detach().float()) for p in model().parameters()]
        params = [nn.Parameter(p.detach().float()) for p in place("fsdp", world, model())]
        ends = []
        for ps in (reference, params):
            optimizer = getattr(torch.optim, name)(ps, lr=1e-2, **options)
            for step in range(3):
                set_grads(ps, step)
                if ps is params:
                    optimizer.step(lambda: inside.append(dtensor_ext.in_spmd_region()))
                else:
                    optimizer.step()
            ends.append([full(p) for p in ps])
        if not all(torch.allclose(a, b) for a, b in zip(*ends, strict=True)):
            bad.append(f"{name} {options}: wrong")
    if any(inside):
        bad.append("a closure ran inside the region")
    return bad


def whole_step_compiled(rank: int, world: int) -> list[str]:
    """torch.compile(optimizer.step): the region opens when it runs; fullgraph says what to do instead."""
    bad: list[str] = []
    for helper in ("global", "local"):
        params = place("hsdp", world, model())
        optimizer = Sgd(params, helper=helper)
        seeds_apart(rank)
        before = torch.get_rng_state()
        step = torch.compile(optimizer.step, backend="aot_eager")
        for i in range(3):
            set_grads(params, i)
            step()
        if differing_copies(params, rank, world) or not torch.equal(before, torch.get_rng_state()):
            bad.append(f"{helper}: copies differ, or the user's generator moved")
    torch._dynamo.reset()
    try:
        torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()
        bad.append("fullgraph: no error")
    except Exception as e:
        if "dtensor_ext opens an SPMD region" not in str(e):
            bad.append(f"fullgraph: {e}")
    return bad


def compiled_helpers(rank: int, world: int, helpers: list[str]) -> dict[str, Any]:
    """Helpers compiled over shards: copies agree, shards are independent, the code is one kernel over the shard."""
    from torch._inductor.utils import run_and_get_code

    seen: dict[str, Any] = {}
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    mesh = init_device_mesh("cpu", (2, world // 2))
    d = distribute_tensor(x, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    for name in helpers:
        seeds_apart(rank)
        stream_seed(5)
        compiled = torch.compile(HELPERS[name], fullgraph=True)

        def run(compiled: Any = compiled) -> Any:
            with dtensor_ext_region(d):
                return compiled(d)

        y, code = run_and_get_code(run)
        # The first region agrees on the stream; a second call shows what the code itself does. CommDebugMode cannot
        # look into compiled code (it is a dispatch mode), the profiler can.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            again = run()
        ran = [e.key for e in profile.key_averages() if "gloo" in e.key or "c10d" in e.key]
        torch._dynamo.reset()
        stream_seed(5)
        with dtensor_ext_region():
            one = torch.compile(HELPERS[name], fullgraph=True)(x)
        seen[name] = {
            "code": "\n".join(code),
            "communication": ran,
            "differ": differing_copies([y], rank, world) + differing_copies([again], rank, world),
            "full": full(y),
            "one": one,
            "index": global_index(d, rank),
            "local_numel": d.to_local().numel(),
        }
        torch._dynamo.reset()
    return seen


__all__ = ["force_eager"]
