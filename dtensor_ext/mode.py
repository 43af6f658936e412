"""What torch functions do inside an SPMD region, on the thread that opened it.

Two things differ from core. A random draw takes the numbers of the shard it is for. And a plain tensor of exactly a
DTensor's global shape, in an elementwise op with it, is read as replicated: every rank drew or computed the same.
Both are decided here, above DTensor's dispatcher, which is neither wrapped nor replaced: its C++ fast path sees only
DTensors. A ``TorchFunctionMode`` is traced by Dynamo, so compiled code behaves alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .layouts import GLOBAL, Plan, Share, dims_of, share
from .rng import derive, seeded

HINT = (
    "dtensor_ext: inside an SPMD region (an optimizer step on DTensors) a plain tensor of exactly the DTensor's global "
    "shape counts as replicated in elementwise ops; any other is an error, because a rank's own values would be mixed "
    "in. Draw noise with the DTensor's own shape (torch.randint(..., x.shape) or randint_like(x)), or wrap the tensor: "
    "DTensor.from_local(t, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)."
)


def _named(owners: tuple[Any, ...], names: str, inplace: bool = False) -> Iterator[Any]:
    for name in names.split():
        for spelling in (name, name + "_") if inplace else (name,):
            for owner in owners:
                if hasattr(owner, spelling):
                    yield getattr(owner, spelling)


def _builtin(functions: Iterator[Any]) -> Iterator[Any]:
    """Those that are not Python functions: Dynamo's guard on a set's members does not hold for these (2.13)."""
    return (f for f in functions if not isinstance(f, FunctionType))


# The elementwise ops that helpers mix noise and values with. What is written in Python is left out: the reflected
# operators of which Python has no other form than for a number on the left, and ``//``.
ELEMENTWISE = frozenset(
    [
        *_builtin(
            _named(
                (torch, torch.Tensor),
                "lt le gt ge eq ne less less_equal greater greater_equal not_equal "
                "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow "
                "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
                "logical_and logical_or logical_xor minimum maximum fmin fmax where lerp addcmul addcdiv "
                "masked_fill clamp clip copysign nextafter hypot atan2 ldexp xlogy",
                inplace=True,
            )
        ),
        *_builtin(
            _named(
                (torch.Tensor,),
                "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __add__ __radd__ __iadd__ __sub__ __isub__ __mul__ __rmul__ "
                "__imul__ __truediv__ __itruediv__ __div__ __idiv__ __mod__ __imod__ __pow__ __ipow__ __and__ __rand__ "
                "__iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ copy_",
            )
        ),
    ]
)
# Those that write their first argument.
WRITING = frozenset(
    f
    for f in ELEMENTWISE
    if f.__name__.startswith("__i") or (f.__name__.endswith("_") and not f.__name__.endswith("__"))
)
FOREACH = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_"))

# Draws, by where their size comes from: arguments, or the first tensor.
SIZED = frozenset([torch.rand, torch.randn, torch.randint])
LIKE = frozenset([torch.rand_like, torch.randn_like, torch.randint_like])
FILLING = frozenset(
    _named((torch.Tensor,), "random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_")
)
SAMPLING = frozenset(
    [
        *_named((torch, torch.Tensor), "bernoulli poisson binomial normal dropout", inplace=True),
        *_named((functional,), "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu"),
    ]
) - {torch.Tensor.normal_, torch.Tensor.bernoulli_}
DRAWS = SIZED | LIKE | FILLING


def _is_mixed(x: Any) -> bool:
    """Whether core refuses `x` beside a DTensor: a plain tensor of more than one element."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.numel() != 1


def _replicated(x: Any, partner: DTensor) -> Any:
    """`x` as a replicated DTensor on the partner's mesh, if it is a plain tensor of the partner's global shape."""
    mesh = partner.device_mesh
    if _is_mixed(x) and x.shape == partner.shape and x.device.type == mesh.device_type:
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x


def _first_dtensor(args: Any, kwargs: Any) -> DTensor | None:
    for x in args:
        if isinstance(x, DTensor):
            return x
    for x in kwargs.values():
        if isinstance(x, DTensor):
            return x
    return None


def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The size that ``rand(*size)``, ``rand(size)``, ``randint(high, size)`` or ``randint(low, high, size)`` wants."""
    if "size" in kwargs:
        return tuple(kwargs["size"])
    if func in (torch.randint, torch.normal):
        return tuple(args[-1])
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)


def _with_size(func: Any, args: Any, kwargs: Any, size: tuple[int, ...]) -> tuple[Any, Any]:
    """The same draw, of another size."""
    if "size" in kwargs:
        return args, {**kwargs, "size": size}
    return ((*args[:-1], size), kwargs) if func is torch.randint else ((size,), kwargs)


class SpmdMode(TorchFunctionMode):
    """The mode of one region. `seed` is the region's own; `plan` says which shard a draw is for."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__()
        self.plan = plan
        self.seed = seed
        # Plain attributes: Dynamo guards on what traced code reads of them, and on nothing else.
        self.shares = plan.shares
        self.other = plan.other
        self.draws = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self.mixed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        # One set after the other: Dynamo guards on each of these questions.
        if func in ELEMENTWISE:
            args, kwargs = self._read_replicated(func, args, kwargs)
        elif func in FOREACH:
            args, kwargs = self._read_replicated_lists(args, kwargs)
        elif func in DRAWS and kwargs.get("generator") is None:
            return self._traced(func, args, kwargs) if compiling else self._draw(func, args, kwargs)
        if compiling:
            return func(*args, **kwargs)
        if func in SAMPLING and kwargs.get("generator") is None:
            return self._draw(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as e:
            if "got mixed torch.Tensor and DTensor" in str(e) and HINT not in str(e):
                raise RuntimeError(f"{e}\n\n{HINT}") from e
            raise

    # --- a plain tensor of the global shape -------------------------------------------------------------------------

    def _read_replicated(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        partner = _first_dtensor(args, kwargs)
        if partner is None:
            return args, kwargs
        # An in-place op cannot turn the plain tensor that it writes into a DTensor: core's error stands.
        if func in WRITING and not isinstance(args[0], DTensor):
            return args, kwargs
        new_args = []
        for x in args:
            read = _replicated(x, partner)
            if read is not x:
                self._note_mixed()
            elif torch.compiler.is_compiling() and _is_mixed(x):
                # In eager core says so, and the hint is added to what it says. Out of a trace nothing can be caught.
                raise RuntimeError(f"got mixed torch.Tensor and DTensor. {HINT}")
            new_args.append(read)
        new_kwargs = {k: v if k == "out" else _replicated(v, partner) for k, v in kwargs.items()}
        return tuple(new_args), new_kwargs

    def _note_mixed(self) -> None:
        """The optimizer's helper draws global shapes: remember it, and read sizes that say both so from now on."""
        if not self.mixed:
            self.mixed = True
            if not torch.compiler.is_compiling() and self.plan.kind != GLOBAL:
                self.plan.kind = GLOBAL
                self.shares, self.other = self.plan.shares, self.plan.other

    def _read_replicated_lists(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """For ``_foreach_`` ops: element i of each list belongs together. The first list stays as it is."""
        partners = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if not any(isinstance(p, DTensor) for p in partners):
            return args, kwargs
        new_args = [partners, *(self._read_list(a, partners) for a in args[1:])]
        return tuple(new_args), {k: self._read_list(v, partners) for k, v in kwargs.items()}

    def _read_list(self, a: Any, partners: Any) -> Any:
        if not isinstance(a, (list, tuple)) or len(a) != len(partners):
            return a
        read = [_replicated(x, p) if isinstance(p, DTensor) else x for x, p in zip(a, partners, strict=True)]
        if any(new is not old for new, old in zip(read, a, strict=True)):
            self._note_mixed()
        return read

    # --- draws ------------------------------------------------------------------------------------------------------

    def _share(self, func: Any, args: Any, kwargs: Any) -> tuple[Share, torch.device]:
        """Over how many shards a draw is split and which is ours, and the device it is drawn on."""
        x = None if func in SIZED else next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if isinstance(x, DTensor):
            return share(dims_of(x)), x.device
        if x is not None:
            return self.shares.get(tuple(x.shape), self.other), x.device
        device = kwargs.get("device")
        where = torch.device(device) if device is not None else torch.get_default_device()
        return self.shares.get(_size(func, args, kwargs), self.other), where

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw for the shard at hand, from a seed that only the region, the draw's number and the shard determine."""
        (count, index), device = self._share(func, args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        self.draws += 1
        seed = derive(self.seed, self.draws) if count == 1 else derive(self.seed, self.draws, index)
        if func in FILLING or func in SIZED:
            # A generator of our own is quicker than the default one with its state saved and restored.
            generator = self._generators.get(device)
            if generator is None:
                generator = self._generators[device] = torch.Generator(device)
            kwargs = {**kwargs, "generator": generator.manual_seed(seed)}
            x = args[0] if func in FILLING else None
            if isinstance(x, DTensor) and not any(isinstance(p, Partial) for p in x.placements):
                # Core has no rule for some of these; filling the shard in place needs none.
                func(args[0].to_local(), *args[1:], **kwargs)
                return args[0]
            return func(*args, **kwargs)
        with seeded(device, seed):
            return func(*args, **kwargs)

    def _traced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same under Dynamo, where seeds are drawn when the graph runs, on all ranks alike.

        A draw for one of n shards becomes a slice of a draw for all n: Inductor's random numbers are a function of
        seed and position, so only the slice is computed, in the kernel that uses it.
        """
        if func in SIZED:
            size = _size(func, args, kwargs)
            count, index = self.shares.get(size, self.other)
            if count == 1:
                return func(*args, **kwargs)
            args, kwargs = _with_size(func, args, kwargs, (count, *size))
            return func(*args, **kwargs)[index]
        x = args[0]
        if func in LIKE:
            if isinstance(x, DTensor):
                whole = torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=x.device)
                drawn = func(whole, *args[1:])
                return _replicated(drawn, x).redistribute(placements=x.placements)
            count, index = self.shares.get(tuple(x.shape), self.other)
            if count == 1:
                return func(*args, **kwargs)
            return func(x.unsqueeze(0).expand(count, *x.shape), *args[1:], **kwargs)[index]
        if func in FILLING:
            if isinstance(x, DTensor):
                whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
                func(whole, *args[1:], **kwargs)
                x.copy_(_replicated(whole, x).redistribute(placements=x.placements))
                return x
            count, index = self.shares.get(tuple(x.shape), self.other)
            if count == 1:
                return func(*args, **kwargs)
            every = torch.empty((count, *x.shape), dtype=x.dtype, device=x.device)
            func(every, *args[1:], **kwargs)
            x.copy_(every[index])
            return x
        return func(*args, **kwargs)
