"""Puts the registry into DTensor's tables and takes it out again.

Everything the extension changes in torch is a `_Change`: an entry of a table, or an attribute. Each remembers what it
found, so that `uninstall` gives back exactly that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import compat, integrations, mode, region, registry
from .registry import Rule, RuleInfo, Strategy

_MISSING: Any = object()


@dataclass
class _Change:
    """`write(value)` was done where `found` stood; `undo` writes that back if the value is still ours."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    found: Any
    ours: Any

    @classmethod
    def make(cls, read: Callable[[], Any], write: Callable[[Any], None], ours: Any) -> _Change:
        found = read()
        write(ours)
        return cls(read, write, found, ours)

    def undo(self) -> None:
        if self.read() is self.ours:
            self.write(self.found)


def _entry(table: MutableMapping[Any, Any], key: Any, value: Any) -> _Change:
    def write(new: Any) -> None:
        if new is _MISSING:
            table.pop(key, None)
        else:
            table[key] = new

    return _Change.make(lambda: table.get(key, _MISSING), write, value)


def _attribute(owner: Any, name: str, value: Any) -> _Change:
    def write(new: Any) -> None:
        if new is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, new)

    return _Change.make(lambda: vars(owner).get(name, _MISSING), write, value)


def _member(members: set[Any], value: Any) -> _Change:
    def write(present: bool) -> None:
        (members.add if present else members.discard)(value)

    return _Change.make(lambda: value in members, write, True)


def _cell(cell: Any, value: Any) -> _Change:
    return _Change.make(lambda: cell.cell_contents, lambda new: setattr(cell, "cell_contents", new), value)


_rule_changes: dict[str, list[_Change]] = {}
_patches: list[_Change] = []
_installed = False


def _put(rule: Rule) -> None:
    """Puts one rule into the tables. An entry of core's that would shadow it, or that it replaces, is taken out."""
    if not compat.torch_in(rule.torch):
        return
    changes = _rule_changes[rule.name] = []
    for op in rule.ops:
        wanted = compat.entries(rule, op)
        if "op_strategy_funcs" in wanted:
            wanted["op_strategy_funcs"] = _asked_while_tracing(wanted["op_strategy_funcs"])
        for name, table in compat.tables().items():
            value = wanted.get(name, _MISSING)
            if value is not _MISSING or op in table:
                changes.append(_entry(table, op, value))


def _take(name: str) -> None:
    for change in reversed(_rule_changes.pop(name, [])):
        change.undo()


def _patch_optimizers() -> None:
    """Every optimizer's ``step`` runs in an SPMD region, also of classes that exist already.

    torch wraps the ``step`` of a class when its first instance is made (`Optimizer.profile_hook_step`). What we change
    is the wrapper's own reference to ``step``, so that whoever holds the wrapper (a scheduler, a bound method) gets the
    region, and loses it with `uninstall`.

    Its public hooks would not do: the post hook does not run when a step raises, and the region must close.

    COMPAT(seen in 2.13): profile_hook_step, and the name ``func`` of its free variable.
    """
    original = torch.optim.Optimizer.profile_hook_step

    @functools.wraps(original)
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        integrations.activate()
        wrapper = original(func)
        with registry.lock:
            _run_in_region(wrapper)
        return wrapper

    _patches.append(_attribute(torch.optim.Optimizer, "profile_hook_step", staticmethod(profile_hook_step)))
    classes = [torch.optim.Optimizer]
    for cls in classes:
        classes += cls.__subclasses__()
        step = vars(cls).get("step")
        if getattr(step, "hooked", False):
            _run_in_region(step)


def _run_in_region(wrapper: Any) -> None:
    """Change what torch's wrapper of a ``step`` calls; once, where classes share a wrapper."""
    names = wrapper.__code__.co_freevars if isinstance(wrapper, FunctionType) else ()
    if "func" not in names:
        # Marked as wrapped by someone else, who runs no hooks of torch's: theirs to keep.
        return
    cell = wrapper.__closure__[names.index("func")]
    if not region.is_around_step(cell.cell_contents):
        _patches.append(_cell(cell, region.around_step(cell.cell_contents)))


def _patch_compile_cache() -> None:
    """A DTensor's key in the on-disk compile cache says what a traced graph depends on: see `compat.cache_hash`."""
    original = DTensor._stable_hash_for_caching

    @functools.wraps(original)
    def _stable_hash_for_caching(self: DTensor) -> str:
        _patch_compiler()
        return compat.cache_hash(self, original(self))

    _patches.append(_attribute(DTensor, "_stable_hash_for_caching", _stable_hash_for_caching))


def _patch_compiler() -> None:
    """What is changed in the compiler, once the program has imported it: that takes half a second, the import here not.

    Called when it is first about to matter: a region opens, or a function over DTensors is traced or looked up in the
    compile cache.
    """
    with registry.lock:
        if _installed:
            _share_lowered_code()
            _patch_returned_views()
            _show_modes_what_eager_shows()


def _show_modes_what_eager_shows() -> None:
    """Dynamo shows a mode the functions that torch lists as overridable, and some more. ``rand_like`` and its kin and
    the ``_foreach_`` ops, which a mode sees in eager, are not among them; they are added.

    COMPAT(seen in 2.13): torch._dynamo.variables.torch.get_overridable_functions, a cached set.
    """
    module = sys.modules.get("torch._dynamo.variables.torch")
    shown: set[Any] = getattr(module, "get_overridable_functions", set)()
    for function in (mode.LIKE | mode.FOREACH) - shown:
        _patches.append(_member(shown, function))


def _asked_while_tracing(strategy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(strategy)
    def asked(op_schema: Any) -> Any:
        _patch_compiler()
        return strategy(op_schema)

    return asked


def _patch_returned_views() -> None:
    """A compiled function can return a bitcast of a DTensor that it was given: see `compat.replays_bitcasts`.

    COMPAT(seen in 2.13): `gen_alias_from_base` and the module that calls it by that name.
    """
    module = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    original = getattr(module, "gen_alias_from_base", None)
    if original is not None and not hasattr(original, "__wrapped__"):
        _patches.append(_attribute(module, "gen_alias_from_base", compat.replays_bitcasts(original)))


def _share_lowered_code() -> None:
    """Let ranks share the code that they lower to, although their DTensors have keys of their own.

    One level below, a graph's own key holds the pickled mesh, with the rank and Python's hash of it, which changes with
    every process: nothing that has a mesh among its inputs is ever found. What lowering depends on is in the graph; of
    the mesh it is its identity. Done at the first key, when Inductor has been imported anyway.

    COMPAT(seen in 2.13): FxGraphCachePickler._reduce_fake_script_object and its `real_obj`; DeviceMesh._stable_hash.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    pickler = getattr(codecache, "FxGraphCachePickler", None)
    original = getattr(pickler, "_reduce_fake_script_object", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _reduce_fake_script_object(self: Any, t: Any) -> Any:
        # Not for its subclass, the key of the traced graph: what is traced may depend on more than the identity.
        if type(self) is pickler and isinstance(t.real_obj, DeviceMesh):
            return str, (t.real_obj._stable_hash(),)
        return original(self, t)

    _patches.append(_attribute(pickler, "_reduce_fake_script_object", _reduce_fake_script_object))


def install() -> None:
    """Install every rule that the running torch needs, the SPMD region around optimizer steps, and the corrections of
    the compile cache's key and of the bitcasts that a compiled function returns.

    Importing `dtensor_ext` calls this. Calling it again does nothing. It may be called before or after DTensor has
    been used: sharding decisions taken so far are forgotten.
    """
    global _installed
    with registry.lock:
        if _installed:
            return
        from . import strategies  # noqa: F401  (fills the registry)

        try:
            for rule in registry.all_rules():
                _put(rule)
            _patch_optimizers()
            _patch_compile_cache()
            region.before_opening.append(_patch_compiler)
            integrations.activate()
        except BaseException:
            _remove_all()
            raise
        _installed = True
        compat.clear_sharding_caches()


def _remove_all() -> None:
    if _patch_compiler in region.before_opening:
        region.before_opening.remove(_patch_compiler)
    while _patches:
        _patches.pop().undo()
    for name in list(_rule_changes)[::-1]:
        _take(name)


def uninstall() -> None:
    """Give DTensor's tables, the optimizers' ``step`` and what is patched for compilation back as they were found.

    Rules stay registered; `install` brings them back. Does nothing if nothing is installed. What another library has
    changed in the meantime is left as it is.
    """
    global _installed
    with registry.lock:
        if not _installed:
            return
        _remove_all()
        _installed = False
        compat.clear_sharding_caches()


def is_installed() -> bool:
    """Whether the extension is in DTensor's tables."""
    return _installed


def rules() -> tuple[RuleInfo, ...]:
    """Every rule, ours and yours: its name, ops, range of torch versions, reason, and whether it is active now."""
    with registry.lock:
        from . import strategies  # noqa: F401

        return tuple(RuleInfo(rule, rule.name in _rule_changes) for rule in registry.all_rules())


def register(*args: Any, **kwargs: Any) -> Callable[[Strategy], Strategy]:
    """Decorator: register a sharding rule of your own, for an op of yours or of core, in the form ours have.

    ::

        @dtensor_ext.register(torch.ops.mylib.scale_rows.default, name="mylib.scale_rows", uneven=True)
        def scale_rows(op, args_schema, kwargs_schema):
            '''y[i, j] = x[i, j] * s[i]: rows are independent; linear in x for a replicated s.'''
            return [
                [Shard(0), Shard(0), Shard(0)],
                [Partial("sum"), Partial("sum"), Replicate()],
            ]

    A row holds the placements of the outputs, then of the tensor inputs, over one mesh dim; all replicated is always
    allowed and not listed. `args_schema` holds a ``TensorMeta`` (shape, stride, dtype) for each tensor.

    Args:
        ops: one overload or several, such as ``torch.ops.mylib.scale_rows.default``.
        name: unique; the function's name by default.
        static_args: names of non-tensor arguments that change the output's shape, dtype, placement or validity.
        uneven: whether shards may be uneven or empty.
        is_valid: ``(op, args_schema, kwargs_schema, input_specs, output_spec) -> bool``, for what depends on the mesh.
        torch: range of versions, as ``">=2.13,<2.16"``; outside it the rule is listed and not installed.
        core_file, reason: where it belongs and why; for listings and patches.

    Raises:
        ValueError: the name or an op is taken, there is no op, or a static argument does not exist.
        TypeError: an op is not an overload.
    """

    def wrap(strategy: Strategy) -> Strategy:
        with registry.lock:
            before = {r.name for r in registry.all_rules()}
            registry.rule(*args, **kwargs)(strategy)
            for rule in registry.all_rules():
                if rule.name not in before:
                    try:
                        compat.torch_in(rule.torch)  # a range that cannot be read is an error here, not in `install`
                        if _installed:
                            _put(rule)
                    except BaseException:
                        _take(rule.name)
                        registry.remove(rule.name)
                        raise
            if _installed:
                compat.clear_sharding_caches()
        return strategy

    return wrap


def unregister(name: str) -> None:
    """Take the rule called `name` out of the registry and of DTensor's tables. Raises KeyError if there is none."""
    with registry.lock:
        registry.remove(name)
        _take(name)
        if _installed:
            compat.clear_sharding_caches()
