"""Which shard a draw belongs to, on every coordinate of a mesh, without processes."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
from fake_mesh import fake_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_ext.layouts import GLOBAL, LOCAL, UNKNOWN, WHOLE, Plan


@contextmanager
def plane(rank):
    with fake_mesh(4, rank):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


@pytest.fixture
def mesh():
    with plane(rank=3) as found:
        yield found


def dtensor(mesh, size, where):
    return distribute_tensor(torch.zeros(size), mesh, where, src_data_rank=None)


def test_a_draw_of_a_global_shape_is_one_for_all(mesh):
    plan = Plan([dtensor(mesh, (8, 4), [Shard(0), Shard(1)])])
    assert plan.shares[8, 4] == WHOLE


def test_a_draw_of_a_local_shape_is_split_over_the_sharded_dims(mesh):
    plan = Plan([dtensor(mesh, (8, 4), [Shard(0), Shard(1)])])
    assert plan.shares[4, 2] == (4, 3)
    plan = Plan([dtensor(mesh, (8, 4), [Replicate(), Shard(0)])])
    assert plan.shares[4, 4] == (2, 1)


def test_a_replicated_parameter_of_the_same_local_shape_makes_the_draw_one_for_all(mesh):
    sharded, copied = dtensor(mesh, (8, 4), [Shard(0), Replicate()]), dtensor(mesh, (4, 4), [Replicate(), Replicate()])
    for kind in (UNKNOWN, GLOBAL, LOCAL):
        assert Plan([sharded, copied], kind=kind).shares[4, 4] == WHOLE


def test_a_plain_parameter_of_the_same_shape_counts_as_copied(mesh):
    plan = Plan([dtensor(mesh, (8, 4), [Shard(0), Replicate()]), torch.zeros(4, 4)])
    assert plan.shares[4, 4] == WHOLE


def test_a_size_that_is_one_parameters_global_and_anothers_local_shape_depends_on_the_kind(mesh):
    params = [dtensor(mesh, (8, 4), [Shard(0), Replicate()]), dtensor(mesh, (4, 4), [Shard(0), Replicate()])]
    assert Plan(params, kind=GLOBAL).shares[4, 4] == WHOLE
    assert Plan(params, kind=LOCAL).shares[4, 4] == (2, 1)
    # Not known: along the dims that both readings allow.
    assert Plan(params, kind=UNKNOWN).shares[4, 4] == (2, 1)


def test_another_size_is_split_only_along_dims_that_shard_everything(mesh):
    a, b = dtensor(mesh, (8, 4), [Shard(0), Shard(1)]), dtensor(mesh, (8,), [Shard(0), Replicate()])
    assert Plan([a, b]).other == (2, 1)
    assert Plan([a, b], kind=GLOBAL).other == WHOLE
    assert Plan([a, b, torch.zeros(3)]).other == WHOLE
    assert Plan([]).other == WHOLE


def test_parameters_on_different_meshes_share_no_dims(mesh):
    other = mesh["a"]
    a, b = dtensor(mesh, (8, 4), [Shard(0), Replicate()]), dtensor(other, (8, 4), [Shard(0)])
    assert Plan([a, b]).shares[4, 4] == WHOLE
    assert Plan([a, b]).meshes == {mesh, other}


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    data=st.data(),
)
def test_copies_get_the_same_share_on_every_rank_whatever_the_parameters(sizes, data):
    """For ranks that hold a copy of a shard, and draw its local shape, the share depends on nothing they differ in."""
    one = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    placements = [
        data.draw(
            st.one_of(st.tuples(one, one), st.just((_StridedShard(0, split_factor=2), Shard(0)))), label="placements"
        )
        for _ in sizes
    ]
    seen: dict[tuple, set] = {}
    for rank in range(4):
        with plane(rank) as mesh:
            params = [dtensor(mesh, s, w) for s, w in zip(sizes, placements, strict=True)]
            for kind in (UNKNOWN, GLOBAL, LOCAL):
                plan = Plan(params, kind=kind)
                for i, p in enumerate(params):
                    mine = distribute_tensor(
                        torch.arange(p.numel()).reshape(p.shape), mesh, placements[i], src_data_rank=None
                    )
                    if mine.to_local().numel() == 0:
                        continue
                    shard = (kind, i, tuple(mine.to_local().flatten().tolist()))
                    drawn = plan.shares.get(tuple(mine.to_local().shape))
                    assert drawn is not None, "the local shape is not known"
                    seen.setdefault(shard, set()).add(drawn)
                    assert plan.shares[tuple(p.shape)][0] == 1 or kind != GLOBAL
    assert all(len(shares) == 1 for shares in seen.values())


def test_local_shapes_of_uneven_and_strided_shards_are_all_known():
    for size, where in itertools.product(
        range(11), [(Shard(0), Shard(0)), (_StridedShard(0, split_factor=2), Shard(0))]
    ):
        known, real = set(), set()
        for rank in range(4):
            with plane(rank) as mesh:
                d = dtensor(mesh, (size, 2), where)
                assert isinstance(d, DTensor)
                known = set(Plan([d]).shares)
                real.add(tuple(d.to_local().shape))
        assert real <= known, (size, where)
