"""The SPMD region on real ranks: copies agree, shards are independent, and the user's generators stand still."""

from __future__ import annotations

import itertools
import math

import pytest
import region_programs as programs
import torch
import training
from ranks import run_ranks

ALL_HELPERS = list(training.HELPERS)


def test_copies_agree_after_20_steps_whatever_the_helper():
    layouts = ["fsdp", "hsdp", "tp", "plain", "uneven", "mixed", "submesh"]
    for seen in run_ranks(programs.train, 4, layouts, ALL_HELPERS, 20):
        assert seen == {(layout, helper): 0 for layout in layouts for helper in ALL_HELPERS}


def test_without_the_extension_copies_drift_or_the_step_stops():
    """The control: if bare torch passes one day, this test says so."""
    layouts = ["hsdp", "tp", "plain", "uneven", "mixed", "submesh"]
    for seen in run_ranks(programs.train, 4, layouts, ["global", "like", "local", "local_filled"], 20, bare=True):
        for (layout, helper), outcome in seen.items():
            if helper == "global":
                assert "mixed torch.Tensor and DTensor" in outcome, (layout, helper, outcome)
            else:
                assert isinstance(outcome, int), (layout, helper, outcome)
                assert outcome > 0, (layout, helper, outcome)


def test_a_helper_that_draws_the_global_shape_gives_one_devices_bits():
    layouts = ["one", "fsdp", "hsdp", "tp", "mixed", "submesh"]
    for seen in run_ranks(programs.results, 4, layouts, ["global"], 5):
        one = seen["one", "global"]
        for layout in layouts[1:]:
            for a, b in zip(one, seen[layout, "global"], strict=True):
                assert torch.equal(a, b), layout


@pytest.fixture(scope="module")
def noise():
    return run_ranks(programs.noise, 4, ["fsdp", "columns", "hsdp", "two"], ALL_HELPERS, 200)[0]


def each(noise):
    for (layout, helper), seen in noise.items():
        yield f"{layout}, {helper}", seen


def test_results_are_always_one_of_the_two_neighbours(noise):
    for name, seen in each(noise):
        assert seen["neighbours"], name


def test_rounding_is_unbiased(noise):
    """False alarm: two tests of a standard normal at 6 for each of 16 programs, 16 * 2 * 2e-9 < 1e-7."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).double()
    bits = x.float().view(torch.int32)
    low = (bits & 0xFFFF).double() / 65536
    down = (bits & 0xFFFF0000).view(torch.float32).double()
    gap = ((bits & 0xFFFF0000) + 0x10000).view(torch.float32).double() - down
    usual = (low > 0.05) & (low < 0.95)
    for name, seen in each(noise):
        share_up = (seen["mean"].double() - down) / gap
        deviation = ((share_up - low) / (low * (1 - low) / 200).sqrt())[usual]
        # Both sums are of independent terms only if shards are; the next test looks at that by itself.
        assert abs(deviation.sum() / math.sqrt(deviation.numel())) < 6, name
        assert abs((deviation.square().sum() - deviation.numel()) / math.sqrt(2 * deviation.numel())) < 6, name


def test_shards_draw_independently_and_copies_alike(noise):
    """Correlation of the rounding errors of two shards at equal local places. False alarm at 6: under 1e-7 in all."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    p_up = (x.view(torch.int32) & 0xFFFF).double().reshape(-1) / 65536
    for name, seen in each(noise):
        shards = {}
        for _, index, total, ups in seen["everyone"]:
            if index in shards:
                assert torch.equal(shards[index][0], total), f"{name}: copies differ"
            else:
                shards[index] = (total, ups)
        assert len(shards) == (2 if "hsdp" in name else 4)
        errors = []
        for index, (_, ups) in shards.items():
            p = p_up[list(index)].clamp(1e-3, 1 - 1e-3)
            errors.append((ups.reshape(len(ups), -1).double() - p) / (p * (1 - p)).sqrt())
        for a, b in itertools.combinations(errors, 2):
            correlation = (a * b).sum() / math.sqrt(a.numel())
            assert abs(correlation) < 6, f"{name}: two shards correlate ({correlation:.1f} sigma)"


def test_the_users_generators_stand_still():
    for bad in run_ranks(programs.generators, 4):
        assert bad == []


def test_several_meshes_stages_and_ranks_outside_never_hang():
    for bad in run_ranks(programs.meshes, 4, seconds=30):
        assert bad == []


def test_nothing_is_communicated_after_the_first_agreement():
    for counts in run_ranks(programs.communication, 4):
        # One all-reduce a mesh dim, once.
        assert counts == [2, 0, 0]


def test_plain_tensors_of_the_global_shape_and_no_others_mix():
    for bad in run_ranks(programs.operands, 4):
        assert bad == []


@pytest.fixture(scope="module")
def whole():
    """Six steps without a break, by layout and helper."""
    nothing = {"global": None, "local": None}
    return {layout: run_ranks(programs.resume, 4, layout, 6, nothing)[0] for layout in ("fsdp", "hsdp")}


@pytest.fixture(scope="module")
def half():
    """Three steps on HSDP, as a checkpoint."""
    return run_ranks(programs.resume, 4, "hsdp", 3, {"global": None, "local": None})[0]


def test_a_resumed_run_draws_what_the_uninterrupted_run_would_have(whole, half):
    rest = run_ranks(programs.resume, 4, "hsdp", 3, half)[3]
    for helper, end in whole["hsdp"].items():
        assert rest[helper]["streams"] == end["streams"]
        assert all(map(torch.equal, rest[helper]["params"], end["params"])), helper
    # The streams matter: from another place in them the run ends elsewhere.
    moved = {helper: {**half[helper], "streams": whole["hsdp"][helper]["streams"]} for helper in half}
    for helper, end in run_ranks(programs.resume, 4, "hsdp", 3, moved)[0].items():
        assert not all(map(torch.equal, end["params"], whole["hsdp"][helper]["params"])), helper


def test_a_run_resumed_on_another_mesh_continues_bit_for_bit(whole, half):
    rest = run_ranks(programs.resume, 2, "fsdp", 3, {"global": half["global"]})[0]["global"]
    assert all(map(torch.equal, rest["params"], whole["fsdp"]["global"]["params"]))


@pytest.mark.parametrize("which", ["seed", "loaded on one rank only"])
def test_streams_that_differ_are_an_error_on_every_rank(which):
    for message in run_ranks(programs.different_states, 4, which, seconds=30):
        assert "different random streams" in message
        assert "on every rank" in message


def test_optimizers_from_before_the_import_get_the_region_and_lose_it_with_uninstall():
    for bad in run_ranks(programs.before_the_import, 4):
        assert bad == []


def test_torchs_own_optimizers_are_right_in_their_region():
    for bad in run_ranks(programs.torchs_own, 4):
        assert bad == []


def test_a_step_compiled_as_a_whole_keeps_copies_equal():
    for bad in run_ranks(programs.whole_step_compiled, 4):
        assert bad == []


def test_compiled_helpers_are_one_kernel_over_the_shard_without_communication():
    for seen in run_ranks(programs.compiled_helpers, 4, ["global", "local", "like"], seconds=120):
        for name, it in seen.items():
            assert it["differ"] == 0, name
            assert it["communication"] == [], name
            assert it["code"].count("async_compile.cpp_pybinding") == 1, name
            # Every buffer that the code makes is of the shard's size or a seed: none of the global size.
            call = it["code"].split("def call")[1].split("def benchmark")[0]
            assert "(64, 48)" not in call, name
            assert "c10d" not in call, name
            # On rows, slices of a draw for all shards are the slices of the draw for the whole.
            assert torch.equal(it["full"], it["one"]), name
