"""Installing changes what it says and nothing else, at any time, on any thread, and gives it all back."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before runtime_wrappers: the two import each other
from fake_mesh import fake_mesh, rows
from torch._functorch._aot_autograd import runtime_wrappers
from torch.distributed.tensor import DTensor, Shard

import dtensor_ext

TABLES = (
    "op_to_rules",
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
)
ROOT = Path(__file__).parents[2]


def found() -> dict:
    """Everything the extension may change in torch, by identity."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    values = {(name, op): id(value) for name in TABLES for op, value in getattr(propagator, name).items()}
    values["profile_hook_step"] = id(vars(torch.optim.Optimizer)["profile_hook_step"])
    values["hash"] = id(vars(DTensor)["_stable_hash_for_caching"])
    values["returned views"] = id(vars(runtime_wrappers)["gen_alias_from_base"])
    for cls in (torch.optim.SGD, torch.optim.Adam):
        step = vars(cls)["step"]
        values[cls.__name__] = id(step)
        if getattr(step, "hooked", False):
            values[cls.__name__, "wrapped"] = id(
                step.__closure__[step.__code__.co_freevars.index("func")].cell_contents
            )
    return values


@pytest.fixture(autouse=True)
def _installed():
    yield
    dtensor_ext.install()


@pytest.fixture(scope="module")
def mesh():
    with fake_mesh() as whole:
        yield whole


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_uninstall_gives_back_everything_as_it_was_found(mesh):
    # An optimizer made before: torch has wrapped its class's step already.
    torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    dtensor_ext.uninstall()
    # The compiler registers rules of its own when it is first used.
    torch.compile(lambda t: t + 1, backend="aot_eager")(rows(torch.ones(8, 8), mesh))
    bare = found()
    dtensor_ext.install()
    # What is patched in the compiler is patched when it is first used.
    torch.compile(lambda t: t.view(torch.uint8) + 0, backend="aot_eager")(rows(torch.ones(8, 8), mesh))
    ours = found()
    changed = {k for k in bare.keys() | ours.keys() if bare.get(k) != ours.get(k)}
    assert {"profile_hook_step", "hash", "returned views", ("SGD", "wrapped")} <= changed
    assert ("op_strategy_funcs", torch.ops.aten.view.dtype) in changed
    assert {k[1] for k in changed if k[0] in TABLES} == {op for i in dtensor_ext.rules() for op in i.ops}
    dtensor_ext.uninstall()
    assert found() == bare


def test_the_tables_of_a_process_that_never_had_the_extension_are_given_back():
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); import torch, torch.distributed.tensor\n"
        "from torch.distributed.tensor import DTensor\n"
        "p = DTensor._op_dispatcher.sharding_propagator\n"
        f"see = lambda: [dict(getattr(p, n)) for n in {TABLES!r}]\n"
        "before, step = see(), torch.optim.Optimizer.profile_hook_step\n"
        "import dtensor_ext; assert dtensor_ext.is_installed(); assert see() != before\n"
        "dtensor_ext.uninstall()\n"
        "same = all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before, see()))\n"
        "print(same, torch.optim.Optimizer.profile_hook_step is step)"
    )
    assert python(code) == "True True"


def test_twice_is_as_once():
    for change in (dtensor_ext.install, dtensor_ext.uninstall):
        change()
        once = found()
        change()
        assert found() == once


def test_importing_twice_is_as_once():
    once, count = found(), len(dtensor_ext.rules())
    import importlib

    importlib.reload(dtensor_ext)
    assert found() == once
    assert len(dtensor_ext.rules()) == count


def test_the_environment_turns_it_off():
    code = (
        "import torch, torch.distributed.tensor as t\n"
        "p = t.DTensor._op_dispatcher.sharding_propagator\n"
        f"see = lambda: [dict(getattr(p, n)) for n in {TABLES!r}]\n"
        "before, step = see(), torch.optim.Optimizer.profile_hook_step\n"
        "import dtensor_ext\n"
        "print(dtensor_ext.is_installed(), see() == before, torch.optim.Optimizer.profile_hook_step is step,"
        " any(r.active for r in dtensor_ext.rules()))"
    )
    assert python(code, DTENSOR_EXT_DISABLE="1") == "False True True False"
    assert python(code, DTENSOR_EXT_DISABLE="0") == "True False False True"


def test_importing_it_imports_neither_torchao_nor_test_tools():
    code = "import dtensor_ext, sys; print([m for m in ('torchao', 'hypothesis', 'pytest') if m in sys.modules])"
    assert python(code) == "[]"


def test_what_another_library_changed_meanwhile_is_left_alone():
    dtensor_ext.uninstall()
    bare = found()
    dtensor_ext.install()
    table, op = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs, torch.ops.aten.view.dtype
    hook = vars(torch.optim.Optimizer)["profile_hook_step"]

    def theirs(*args):
        raise AssertionError

    before_theirs = table[op]
    table[op], torch.optim.Optimizer.profile_hook_step = theirs, staticmethod(theirs)
    try:
        dtensor_ext.uninstall()
        assert table[op] is theirs
        assert torch.optim.Optimizer.profile_hook_step is theirs
    finally:
        # Theirs is taken back as they would: what they found is what stands there then.
        table[op], torch.optim.Optimizer.profile_hook_step = before_theirs, hook
    restored = {k: v for k, v in found().items() if k not in (("op_strategy_funcs", op), "profile_hook_step")}
    assert restored == {k: v for k, v in bare.items() if k not in (("op_strategy_funcs", op), "profile_hook_step")}
    _give_back(table, op, bare)


def _give_back(table, op, bare):
    """Core's own entries, which the test above has hidden behind somebody else's."""
    from torch.distributed.tensor._ops._tensor_ops import propagate_single_input_strategy

    table[op] = propagate_single_input_strategy
    original = vars(torch.optim.Optimizer)["profile_hook_step"].__func__.__wrapped__
    torch.optim.Optimizer.profile_hook_step = staticmethod(original)
    assert bare["op_strategy_funcs", op] == id(table[op])


def test_many_threads_may_install_and_uninstall_at_once():
    dtensor_ext.uninstall()
    bare = found()
    start, failures = threading.Barrier(6), []

    def work(k: int) -> None:
        start.wait(30)
        try:
            for i in range(20):
                (dtensor_ext.install if (i + k) % 2 else dtensor_ext.uninstall)()
                assert len(dtensor_ext.rules()) >= 5
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures
    dtensor_ext.uninstall()
    assert found() == bare


# --- after DTensor has been used ------------------------------------------------------------------------------------


class Worker:
    """A thread that lives on, as autograd's and a data loader's do, and runs what it is given."""

    def __enter__(self):
        self.asked, self.answers = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.asked.put(None)
        self.thread.join(30)

    def _serve(self):
        while (f := self.asked.get()) is not None:
            try:
                self.answers.put(f())
            except Exception as e:
                self.answers.put(e)

    def __call__(self, f):
        self.asked.put(f)
        return self.answers.get(timeout=60)


def look(mesh):
    """What the rules change, in one value: shapes after two views, and where views of uneven tensors lie."""
    x = rows(torch.ones(8, 8), mesh)
    uneven = rows(torch.ones(2, 4, 2), mesh)
    return (
        tuple(x.view(torch.uint8).shape),
        tuple(x.view(torch.bfloat16).shape),
        torch.view_as_complex(uneven).placements[0],
        torch.view_as_real(rows(torch.ones(4, 3, dtype=torch.complex64), mesh, Shard(1))).placements[0],
        torch.ops.aten.view_copy.dtype(rows(torch.ones(2, 8), mesh), torch.uint8).placements[0],
    )


OURS = ((8, 32), (8, 16), Shard(0), Shard(1), Shard(0))


def test_installing_after_use_forgets_what_was_decided_on_this_thread(mesh):
    dtensor_ext.uninstall()
    for _ in range(2):
        before = look(mesh)
        assert all(a != b for a, b in zip(before[1:], OURS[1:], strict=True)), before
        dtensor_ext.install()
        assert look(mesh) == OURS
        assert look(mesh) == OURS
        dtensor_ext.uninstall()
        assert look(mesh) == before


def test_installing_after_use_reaches_threads_that_have_used_dtensor_too(mesh):
    dtensor_ext.uninstall()
    with Worker() as other:
        before = other(lambda: look(mesh))
        assert before == other(lambda: look(mesh)) != OURS
        for _ in range(2):
            dtensor_ext.install()
            assert other(lambda: look(mesh)) == OURS
            assert look(mesh) == OURS
            dtensor_ext.uninstall()
            assert other(lambda: look(mesh)) == before
            assert look(mesh) == before
