"""The on-disk compile cache, shared by ranks that compile one after another."""

from __future__ import annotations

import cache_programs as programs
import pytest
from ranks import run_ranks


@pytest.mark.parametrize("which", ["redistribute", pytest.param("uneven", marks=pytest.mark.slow), "made inside"])
def test_no_rank_runs_another_ranks_graph_cold_or_warm(which, tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for turn in ("cold", "warm"):
        for seen in run_ranks(programs.in_turn, 2, which, env=env):
            assert seen["got"] == seen["want"], turn
            if turn == "warm" and which != "made inside":
                # A rank still finds its own graph of the run before.
                assert seen["aot"].get("autograd_cache_hit") == 1, seen


def test_bare_torch_runs_another_ranks_graph():
    """The control: core's key of a DTensor lacks the coordinate."""
    seen = run_ranks(programs.in_turn, 2, "redistribute", bare=True)
    assert [s["got"] == s["want"] for s in seen] == [True, False]


def test_ranks_that_lower_to_the_same_code_share_it():
    seen = run_ranks(programs.in_turn, 2, "pointwise")
    assert all(s["got"] == s["want"] for s in seen)
    assert seen[0]["inductor"].get("fxgraph_cache_miss") == 1, seen
    for s in seen[1:]:
        assert s["inductor"].get("fxgraph_cache_hit") == 1, seen
