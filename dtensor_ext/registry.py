"""What a sharding rule is, and the table of all of them.

A rule is a pure function with the signature that PyTorch core uses for a strategy over one mesh dim,
``(op, args_schema, kwargs_schema) -> [[output placements..., input placements...], ...]``, plus the data
that says when and how it may be used. `compat.lower` turns it into what the running torch understands,
`install` puts it into DTensor's tables. This module only remembers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

from torch._ops import OpOverload

# One row a possibility: the outputs' placements, then the placements of the tensor inputs in schema order.
Row = list[Any]
Strategy = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], list[Row]]
# (op, args_schema, kwargs_schema, input specs, output spec) -> may this combination over the whole mesh run?
Validity = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Sequence[Any], Any], bool]


@dataclass(frozen=True)
class Rule:
    """A sharding rule and what must be known to use it, to list it and to send it upstream.

    Attributes:
        name: unique, ``family.op``.
        ops: the exact overloads that the rule serves.
        strategy: the function; its docstring is the mathematics.
        static_args: names of the non-tensor arguments that change the output's shape, dtype, placement or
            validity. They become part of DTensor's cache key.
        uneven: whether shards may be uneven or empty when the input is already placed so.
        is_valid: what depends on the mesh's size, asked for each combination over all mesh dims.
        torch: the versions that lack the rule or have it wrong, as ``">=2.13,<2.16"``.
        core_file: where the rule belongs in PyTorch core; empty for an op that is not core's.
        reason: what happens without the rule, in one sentence.
    """

    name: str
    ops: tuple[OpOverload, ...]
    strategy: Strategy
    static_args: tuple[str, ...] = ()
    uneven: bool = False
    is_valid: Validity | None = None
    torch: str = ""
    core_file: str = ""
    reason: str = ""

    @property
    def mathematics(self) -> str:
        """Why each row holds: the strategy's docstring, dedented."""
        return inspect.getdoc(self.strategy) or ""


@dataclass(frozen=True)
class RuleInfo:
    """One line of `dtensor_ext.rules()`: a rule and whether it is in DTensor's tables now."""

    rule: Rule
    active: bool

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def ops(self) -> tuple[OpOverload, ...]:
        return self.rule.ops

    @property
    def torch(self) -> str:
        return self.rule.torch

    @property
    def reason(self) -> str:
        return self.rule.reason

    def __str__(self) -> str:
        state = "active" if self.active else "not active"
        ops = ", ".join(str(op) for op in self.ops)
        return f"{self.name} ({state}; torch {self.torch or 'any'}): {ops}. {self.reason}"


# Guards this table and DTensor's tables: whoever changes either holds it.
lock = RLock()
_rules: dict[str, Rule] = {}


def add(rule: Rule) -> None:
    """Remember `rule`. Raises ValueError if its name or one of its ops is taken, or if it serves no op."""
    with lock:
        if not rule.ops:
            raise ValueError(f"dtensor_ext: rule {rule.name!r} names no op")
        if rule.name in _rules:
            raise ValueError(f"dtensor_ext: a rule named {rule.name!r} is already registered")
        for op in rule.ops:
            if not isinstance(op, OpOverload):
                raise TypeError(
                    f"dtensor_ext: rule {rule.name!r}: {op!r} is not an overload; "
                    "write torch.ops.<namespace>.<name>.<overload>, for example torch.ops.aten.view.dtype"
                )
            names = {a.name for a in op._schema.arguments}
            unknown = [a for a in rule.static_args if a not in names]
            if unknown and len(rule.ops) == 1:
                raise ValueError(f"dtensor_ext: rule {rule.name!r}: {op} has no argument {unknown[0]!r}")
        for other in _rules.values():
            both = set(other.ops) & set(rule.ops)
            if both:
                taken = sorted(map(str, both))[0]
                raise ValueError(f"dtensor_ext: {taken} already has rule {other.name!r}")
        _rules[rule.name] = rule


def remove(name: str) -> Rule:
    """Forget the rule called `name` and return it. Raises KeyError if there is none."""
    with lock:
        return _rules.pop(name)


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order of registration."""
    with lock:
        return tuple(_rules.values())


def rule(
    ops: OpOverload | Iterable[OpOverload],
    *,
    name: str = "",
    static_args: Iterable[str] = (),
    uneven: bool = False,
    is_valid: Validity | None = None,
    torch: str = "",
    core_file: str = "",
    reason: str = "",
) -> Callable[[Strategy], Strategy]:
    """Decorator: the function is a sharding rule of `ops`. The arguments are those of `Rule`."""

    def wrap(strategy: Strategy) -> Strategy:
        overloads = (ops,) if isinstance(ops, OpOverload) else tuple(ops)
        add(
            Rule(
                name=name or strategy.__name__,
                ops=overloads,
                strategy=strategy,
                static_args=tuple(static_args),
                uneven=uneven,
                is_valid=is_valid,
                torch=torch,
                core_file=core_file,
                reason=reason,
            )
        )
        return strategy

    return wrap
