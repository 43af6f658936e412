"""Bitcasts of DTensors on four real ranks, each compared with the plain op; and the controls on bare torch."""

from __future__ import annotations

from collections import Counter

import bitcast_programs as programs
import bitcast_sweep as sweep
import pytest
from ranks import run_ranks

FEW_SHAPES = {
    (4,): [(8, 8), (5, 4), (3, 40), (2, 6, 8), (1, 4), (0, 4), (4, 0), (20,), (7, 3), ()],
    (2, 2): [(8, 8), (5, 4), (0, 4), (7, 3), ()],
}


def faults(seen: list[dict], at_least: int) -> list[str]:
    """Every rank's faults; that the ranks saw the same cases, and enough of them, is checked on the way."""
    assert {r["count"] for r in seen} == {seen[0]["count"]}
    assert seen[0]["count"] >= at_least
    return [line for r in seen for line in r["bad"]]


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_every_bitcast_is_the_plain_one_on_every_rank(mesh):
    assert faults(run_ranks(sweep.sweep, 4, [mesh], sweep.PAIRS, FEW_SHAPES[mesh]), 500) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_every_pair_of_dtypes_and_every_shape(mesh):
    assert faults(run_ranks(sweep.sweep, 4, [mesh], sweep.ALL_PAIRS, sweep.SHAPES, seconds=900), 5000) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_three_dimensional_meshes(mesh):
    assert faults(run_ranks(sweep.sweep, 4, [mesh], sweep.PAIRS, sweep.SHAPES, seconds=900), 5000) == []


def test_a_reduction_still_to_be_made_is_made_before_its_bits_are_read():
    assert faults(run_ranks(sweep.partials, 4), 300) == []


@pytest.fixture(scope="module")
def bare():
    """What the sweep finds on bare torch, by op, on the rank that finds most."""
    seen = run_ranks(sweep.sweep, 4, [(4,)], sweep.PAIRS, FEW_SHAPES[4,], bare=True)
    each = [Counter(line.split()[0] for line in r["bad"]) for r in seen]
    return max(each, key=lambda c: c.total())


# Not exact: a count moves with the shapes. An op that core gets right one day has none, and the test says so.
@pytest.mark.parametrize(
    ("op", "at_least"),
    [
        ("view.dtype", 100),
        ("view_copy.dtype", 20),
        ("prims.view_of_dtype", 100),
        ("view_as_real", 4),
        ("view_as_complex", 8),
    ],
)
def test_on_bare_torch_the_sweep_finds_faults_in(bare, op, at_least):
    assert bare[op] >= at_least, bare


def test_on_bare_torch_a_partial_passes_where_it_must_not():
    lines = run_ranks(sweep.partials, 4, bare=True)[0]["bad"]
    assert sum("view.dtype" in line and "Partial passed a change of dtype" in line for line in lines) >= 50
    assert sum("view_as_real" in line and "wrong value" in line for line in lines) >= 3
    assert sum("complex numbers have no max" in line for line in lines) >= 3


def test_the_out_variant_writes_out_where_it_is_or_refuses_on_every_rank_alike():
    seen = run_ranks(programs.out_variant, 4)
    assert faults(seen, 100) == []
    assert all(r["refused"] == seen[0]["refused"] for r in seen)
    # Of uneven cuts only: most combinations work.
    assert 0 < len(seen[0]["refused"]) < seen[0]["count"] / 3


def test_on_bare_torch_the_out_variant_moves_out():
    lines = run_ranks(programs.out_variant, 4, bare=True)[0]["bad"]
    assert sum("out moved to" in line for line in lines) >= 10
    assert sum("float32->torch.int32" in line for line in lines) >= 10


@pytest.fixture(scope="module")
def small():
    return run_ranks(programs.several, 4, ["out_partial", "errors", "submesh", "transposed"])


def test_the_out_variant_reads_the_bits_of_the_sum(small):
    assert [r["out_partial"] for r in small] == [[]] * 4


def test_every_rank_raises_plains_error(small):
    assert [r["errors"] for r in small] == [[]] * 4


def test_a_rank_outside_the_mesh_gets_the_metadata_and_makes_no_one_wait(small):
    assert [r["submesh"] for r in small] == [[]] * 4


def test_a_transposed_tensor_is_viewed_or_refused_as_plain_does(small):
    assert [r["transposed"] for r in small] == [[]] * 4


def test_compiled_chains_of_bitcasts_equal_plain_ones():
    assert run_ranks(programs.same_compiled, 2, ["aot_eager", "inductor"]) == [[]] * 2


def test_a_compiled_function_returns_a_bitcast_of_its_input():
    assert faults(run_ranks(programs.returned_views, 4, "aot_eager"), 24) == []


def test_on_bare_torch_a_compiled_function_cannot_return_one():
    lines = run_ranks(programs.returned_views, 2, "aot_eager", bare=True)[0]["bad"]
    assert sum("as_strided not supported with DTensor" in line for line in lines) >= 8
