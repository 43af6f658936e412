"""torchao's low-bit optimizer states as local tensors of a DTensor.

``OptimState8bit``, ``OptimState4bit`` and ``OptimStateFp8`` show the dtype of the parameter, but hold codes: an
appearance dtype. ``view``, ``detach`` and the collectives of torchao 0.18 forget it and show float32. What
``DTensor.from_local`` wraps is a view, so the state of a bf16 parameter becomes a float32 one, and the first step stops
at ``lerp`` (pytorch/ao#3314). Here those ops keep the dtype, through ``implements``, the hook that torchao gives for
that. torchao 0.7 has no appearance dtype, and nothing is missing there.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ..layouts import GLOBAL, LOCAL

aten = torch.ops.aten
_MODULES = ("torchao.optim", "torchao.prototype.low_bit_optim")
_CLASSES = {
    "OptimState8bit": "subclass_8bit",
    "OptimState4bit": "subclass_4bit",
    "OptimStateFp8": "subclass_fp8",
}
_seen: set[type] = set()


def activate() -> None:
    """Complete torchao's optimizer states if the program has imported them and their ops forget the dtype."""
    for package in _MODULES:
        for name, module in _CLASSES.items():
            cls = getattr(sys.modules.get(f"{package}.{module}"), name, None)
            if cls is not None and cls not in _seen:
                _seen.add(cls)
                if _forgets_dtype(cls):
                    _complete(cls)


def draw_kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Whether torchao's rounding helper unwraps DTensors (0.17 and later) or draws the shape that it is given."""
    package = type(optimizer).__module__.rpartition(".")[0]
    helper = getattr(sys.modules.get(f"{package}.quant_utils"), "_fp32_to_bf16_sr", None)
    if package not in _MODULES or helper is None:
        return None
    return LOCAL if "to_local" in helper.__code__.co_names else GLOBAL


def _forgets_dtype(cls: Any) -> bool:
    try:
        state = cls.zeros((256,), block_size=256, dtype=torch.bfloat16)
    except TypeError:
        # No appearance dtype in this version.
        return False
    return any(out.dtype != state.dtype for out in (state.view(state.shape), state.detach()))


def _like(x: Any, tensors: dict[str, torch.Tensor], shape: Any = None) -> Any:
    """A state of `x`'s class and appearance made of other inner tensors; `shape` for the class that stores one."""
    _, context = x.__tensor_flatten__()
    if shape is not None and hasattr(x, "_shape"):
        context = [shape if c is x._shape else c for c in context]
    return type(x).__tensor_unflatten__(tensors, context)


def _inner(x: Any) -> dict[str, torch.Tensor]:
    names, _ = x.__tensor_flatten__()
    return {name: getattr(x, name) for name in names}


def _complete(cls: Any) -> None:
    packed = cls.__name__ == "OptimState4bit"

    @cls.implements(aten.view.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        x, shape = args
        inner = _inner(x)
        if not packed:
            return _like(x, {**inner, "codes": inner["codes"].view(shape)})
        # Two codes share a byte, so what is stored is flat and the shape is only remembered.
        if tuple(shape) == tuple(x.shape):
            return _like(x, inner)
        if tuple(shape) == (-1,):
            return _like(x, inner, (math.prod(x.shape),))
        raise ValueError(f"{cls.__name__}: a view keeps the shape or flattens, got {tuple(shape)} for {tuple(x.shape)}")

    @cls.implements(aten.view.dtype)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        x, dtype = args
        if dtype != x.dtype:
            raise ValueError(
                f"{cls.__name__} shows {x.dtype} but holds codes: it cannot be read as {dtype}; dequantize() it first"
            )
        return _like(x, _inner(x))

    functional = [
        getattr(namespace, name).default
        for namespace, name in (
            (torch.ops.c10d_functional, "all_gather_into_tensor"),
            (torch.ops._c10d_functional, "all_gather_into_tensor"),
            (torch.ops.c10d_functional, "wait_tensor"),
            (torch.ops._c10d_functional, "wait_tensor"),
            (torch.ops._c10d_functional, "_wrap_tensor_autograd"),
            (aten, "detach"),
        )
        if hasattr(namespace, name)
    ]

    @cls.implements(functional)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        inner = _inner(x)
        moved = {name: func(inner[name], *rest, **kwargs) for name in ("codes", "scale")}
        # The table of values is the same on every rank.
        shape = None
        if packed:
            rows = x.shape[0] * moved["codes"].numel() // inner["codes"].numel() if x.ndim else 0
            shape = (rows, *x.shape[1:])
        return _like(x, {**inner, **moved}, shape)
