"""The SPMD region: where ranks that hold copies draw alike, and the user's own generators stand still.

An optimizer step on DTensors runs in one by itself; `spmd_region` opens one by hand.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import integrations, streams
from .layouts import GLOBAL, LOCAL, UNKNOWN, Plan
from .mode import SpmdMode
from .rng import default_generators, derive

# Called before a region opens: `install` sees there to what the compiler lacks, once it has been imported.
before_opening: list[Callable[[], None]] = []


class _Current(threading.local):
    region: _Region | None = None


_current = _Current()


class _Region:
    """One opened region: the mode, and the states that it keeps of the user's generators."""

    def __init__(self, plan: Plan, watch: bool = True) -> None:
        self.plan = plan
        # Code that is known to draw nothing and to mix nothing is not watched: a mode costs each torch function, and
        # each attribute of a tensor, about a microsecond.
        self.watch = watch
        for prepare in before_opening:
            prepare()
        # May communicate, once for these meshes; nothing has been changed yet if it raises.
        stream = streams.stream_of(plan.meshes)
        self.seed = derive(stream.seed, stream.count)
        # Counted on entering, so that a step that raises on one rank leaves the ranks in step.
        stream.count += 1
        self.mode = SpmdMode(plan, derive(self.seed, 1))
        self.generators = default_generators(mesh.device_type for mesh in plan.meshes)

    def open(self) -> None:
        self.outside = [g.get() for g in self.generators]
        for g in self.generators:
            g.seed(self.seed)
        self._enter()

    def _enter(self) -> None:
        if self.watch:
            self.mode.__enter__()
        _current.region = self

    def close(self) -> None:
        _current.region = None
        try:
            if self.watch:
                self.mode.__exit__(None, None, None)
        finally:
            for g, state in zip(self.generators, self.outside, strict=True):
                g.set(state)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, everything is as it is outside the region: the user's generators, and core's rule for operands."""
        inside = [g.get() for g in self.generators]
        self.close()
        try:
            yield
        finally:
            self.outside = [g.get() for g in self.generators]
            for g, state in zip(self.generators, inside, strict=True):
                g.set(state)
            self._enter()


@contextmanager
def _opened(plan: Plan, watch: bool = True) -> Iterator[_Region]:
    region = _Region(plan, watch)
    region.open()
    try:
        yield region
    finally:
        region.close()
    if plan.kind == UNKNOWN and (region.mode.mixed or region.mode.draws):
        # Operands mix, or do not, on all ranks alike: what the first step shows holds from now on.
        plan.kind = GLOBAL if region.mode.mixed else LOCAL


@contextmanager
def spmd_region(*subjects: Any) -> Iterator[None]:
    """Open an SPMD region by hand, for code that is not an optimizer's ``step``.

    Args:
        subjects: what the code works on: tensors (DTensors or plain), iterables of them (``model.parameters()``),
            optimizers, or device meshes. With none, the region is one of plain tensors on this process.

    Inside, on this thread:

    - random numbers come from a stream that all ranks of the subjects' meshes agree on. Ranks that hold copies of a
      shard draw the same, ranks with different shards draw independently, and a draw of the global shape is the same
      on every rank and on one device;
    - a plain tensor of exactly a DTensor's global shape counts as replicated in elementwise ops;
    - the user's default generators stand still: afterwards they continue as if the region had not been there, also
      when it raises.

    The first region over a set of meshes is a collective over them (see `dtensor_ext.streams`); later ones
    communicate nothing. Every rank of the meshes has to open it, as it has to take part in any SPMD program. A region
    inside a region is part of the outer one. Default generators belong to the process: other threads should not draw
    from them meanwhile.

    Raises:
        RuntimeError: the ranks were given different seeds or states; raised on every rank alike.
        TypeError: a subject is none of the above.
    """
    if _current.region is not None:
        yield
        return
    tensors, meshes = _subjects(subjects)
    with _opened(Plan(tensors, meshes)):
        yield


def in_spmd_region() -> bool:
    """Whether this thread is inside an SPMD region."""
    return _current.region is not None


def _subjects(subjects: Iterable[Any]) -> tuple[list[torch.Tensor], list[DeviceMesh]]:
    tensors: list[torch.Tensor] = []
    meshes: list[DeviceMesh] = []
    for subject in subjects:
        if isinstance(subject, torch.Tensor):
            tensors.append(subject)
        elif isinstance(subject, DeviceMesh):
            meshes.append(subject)
        elif isinstance(subject, torch.optim.Optimizer):
            tensors += parameters(subject)
        elif isinstance(subject, Iterable) and not isinstance(subject, (str, bytes)):
            more, further = _subjects(subject)
            tensors += more
            meshes += further
        else:
            raise TypeError(
                f"dtensor_ext.spmd_region: expected tensors, optimizers or device meshes, got {type(subject).__name__}"
            )
    return tensors, meshes


# --- around Optimizer.step ------------------------------------------------------------------------------------------

# An optimizer's plan, with the parameters it was made from: made again when they change.
_plans: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[Any], Plan]] = weakref.WeakKeyDictionary()


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All parameters of `optimizer`, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plan(optimizer: torch.optim.Optimizer, params: list[Any]) -> Plan:
    known = _plans.get(optimizer)
    if known is not None and len(known[0]) == len(params) and all(map(_is, known[0], params)):
        return known[1]
    kind = known[1].kind if known is not None else integrations.draw_kind(optimizer)
    plan = Plan(params, kind=kind)
    _plans[optimizer] = (params, plan)
    return plan


def _is(a: Any, b: Any) -> bool:
    return a is b


def around_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of an optimizer class, run in an SPMD region where the optimizer holds DTensors."""

    uncompiled = _run_step_uncompiled()

    @functools.wraps(step)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        if torch.compiler.is_compiling():
            # Someone compiles the whole step. torch's own optimizers draw nothing and are traced as ever; another's
            # region has to open when the step runs, not when it is traced, so the step itself runs uncompiled. What
            # it compiles for itself stays compiled.
            if _is_torchs(optimizer) or not _holds_dtensors(optimizer):
                return step(*args, **kwargs)
            return uncompiled(step, args, kwargs)
        return _run_step(step, args, kwargs)

    in_region._dtensor_ext_region = True  # type: ignore[attr-defined]
    return in_region


def is_around_step(step: Callable[..., Any]) -> bool:
    """Whether `step` is one that `around_step` made."""
    return hasattr(step, "_dtensor_ext_region")


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _holds_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, DTensor):
                return True
    return False


def _run_step(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    optimizer = args[0]
    if _current.region is not None or not _holds_dtensors(optimizer):
        return step(*args, **kwargs)
    integrations.activate()
    with _opened(_plan(optimizer, parameters(optimizer)), watch=not _is_torchs(optimizer)) as region:
        args, kwargs = _closure_outside(region, args, kwargs)
        return step(*args, **kwargs)


@functools.cache
def _run_step_uncompiled() -> Callable[..., Any]:
    # Made late: `torch.compiler.disable` imports Dynamo, which takes half a second. An optimizer has imported it too.
    return torch.compiler.disable(
        _run_step,
        reason="dtensor_ext opens an SPMD region around an optimizer step on DTensors, which torch.compile cannot "
        "trace: compile the functions that the step calls (as torchao does), or let the graph break here "
        "(fullgraph=False)",
    )


def _closure_outside(region: _Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The same call, with the closure, the user's own forward and backward, run outside the region."""

    def outside(closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure)
        def run(*a: Any, **k: Any) -> Any:
            with region.suspended():
                return closure(*a, **k)

        return run

    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": outside(kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], outside(args[1]), *args[2:]), kwargs
    return args, kwargs
