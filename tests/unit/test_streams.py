"""Seeds and the streams' state, in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

import dtensor_ext
from dtensor_ext.rng import derive, seeded


@pytest.fixture(autouse=True)
def anew():
    dtensor_ext.load_state_dict({"version": 1, "streams": []})
    yield
    dtensor_ext.load_state_dict({"version": 1, "streams": []})


def draw():
    with dtensor_ext.spmd_region():
        return torch.rand(4)


def test_each_region_draws_something_else_and_the_state_brings_it_back():
    first = draw()
    state = dtensor_ext.state_dict()
    second = draw()
    assert not torch.equal(first, second)
    dtensor_ext.load_state_dict(state)
    assert torch.equal(draw(), second)


def test_a_state_that_was_loaded_and_not_used_yet_is_saved_again():
    draw()
    state = dtensor_ext.state_dict()
    dtensor_ext.load_state_dict(state)
    assert dtensor_ext.state_dict() == state


def test_the_seed_is_the_users_without_moving_the_generator():
    torch.manual_seed(2)
    first = draw()
    after = torch.rand(2)
    torch.manual_seed(2)
    assert torch.equal(torch.rand(2), after)
    dtensor_ext.load_state_dict({"version": 1, "streams": []})
    torch.manual_seed(2)
    assert torch.equal(draw(), first)
    dtensor_ext.load_state_dict({"version": 1, "streams": []})
    torch.manual_seed(3)
    assert not torch.equal(draw(), first)


def test_draws_in_one_region_differ():
    with dtensor_ext.spmd_region():
        assert not torch.equal(torch.rand(4), torch.rand(4))


def test_a_generator_of_the_users_is_left_alone():
    g = torch.Generator().manual_seed(1)
    want = torch.rand(4, generator=torch.Generator().manual_seed(1))
    with dtensor_ext.spmd_region():
        assert torch.equal(torch.rand(4, generator=g), want)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2, "streams": []},
        {"version": 1, "streams": [{"name": "x"}]},
        {"version": 1, "streams": [{"name": "x", "seed": -1, "count": 0}]},
        {"version": 1, "streams": [{"name": "x", "seed": 1, "count": "many"}]},
        {"version": 1, "streams": 3},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state):
    draw()
    before = dtensor_ext.state_dict()
    with pytest.raises(ValueError, match="not a state of dtensor_ext's streams"):
        dtensor_ext.load_state_dict(state)
    assert dtensor_ext.state_dict() == before


def test_manual_seed_starts_anew_and_refuses_what_is_no_seed():
    try:
        dtensor_ext.manual_seed(7)
        first = draw()
        dtensor_ext.manual_seed(7)
        assert torch.equal(draw(), first)
        for seed in (-1, 2**63):
            with pytest.raises(ValueError, match="seed must be in"):
                dtensor_ext.manual_seed(seed)
    finally:
        dtensor_ext.streams._base_seed = None


def test_the_module_is_stateful_for_distributed_checkpoints():
    assert isinstance(dtensor_ext, Stateful)


def test_derived_seeds_depend_on_every_part():
    seen = {derive(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seen) == 512
    assert derive(1, 2) == derive(1, 2)
    assert derive(1) != derive(1, 0)
    assert all(0 <= s < 2**63 for s in seen)


def test_seeded_restores_also_after_an_error():
    before = torch.get_rng_state()

    def broken():
        with seeded(torch.device("cpu"), 3):
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert torch.equal(before, torch.get_rng_state())


def test_a_region_takes_tensors_optimizers_and_meshes_and_nothing_else():
    p = torch.nn.Parameter(torch.zeros(3))
    with dtensor_ext.spmd_region([p], torch.optim.SGD([p], lr=1.0), iter([p])):
        assert dtensor_ext.in_spmd_region()
    assert not dtensor_ext.in_spmd_region()
    with pytest.raises(TypeError, match="expected tensors, optimizers or device meshes, got str"):
        dtensor_ext.spmd_region("parameters").__enter__()
