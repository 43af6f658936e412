"""Rules of one's own: how they are registered, checked, listed and taken back."""

from __future__ import annotations

import pytest
import torch
from fake_mesh import fake_mesh, rows
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.library import custom_op

import dtensor_ext
from dtensor_ext.compat import ShardingPlaceholder, torch_in


@pytest.fixture(scope="module")
def mesh():
    with fake_mesh() as whole:
        yield whole


@custom_op("dtensor_ext_test::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s[:, None]


@scale_rows.register_fake
def _(x, s):
    return torch.empty_like(x)


@custom_op("dtensor_ext_test::pad", mutates_args=())
def pad(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], count)], 1)


@pad.register_fake
def _(x, count):
    return x.new_empty(x.shape[0], x.shape[1] + count)


SCALE, PAD = torch.ops.dtensor_ext_test.scale_rows.default, torch.ops.dtensor_ext_test.pad.default


@pytest.fixture(autouse=True)
def _forget():
    """Whatever a test registers is gone after it, and the extension installed."""
    before = {info.name for info in dtensor_ext.rules()}
    yield
    for info in dtensor_ext.rules():
        if info.name not in before:
            dtensor_ext.unregister(info.name)
    dtensor_ext.install()


def by_rows(op, args_schema, kwargs_schema):
    """y[i, j] = x[i, j] * s[i]: rows are independent; linear in x for a replicated s."""
    return [[Shard(0), Shard(0), Shard(0)], [Partial("sum"), Partial("sum"), Replicate()]]


def pad_by_rows(op, args_schema, kwargs_schema):
    return [[ShardingPlaceholder(0), ShardingPlaceholder(0)]]


def works(mesh) -> bool:
    try:
        SCALE(rows(torch.ones(8, 3), mesh), rows(torch.ones(8), mesh))
    except NotImplementedError:
        return False
    return True


def info(name):
    return next(i for i in dtensor_ext.rules() if i.name == name)


def test_a_custom_op_runs_by_its_rule(mesh):
    x, s = torch.randn(8, 3), torch.randn(8)
    assert not works(mesh)
    dtensor_ext.register(SCALE, name="test.scale")(by_rows)
    got = SCALE(rows(x, mesh), rows(s, mesh))
    assert got.placements == (Shard(0),)
    assert torch.equal(got.to_local(), scale_rows(x, s).chunk(4)[0])
    assert info("test.scale").active


def test_a_sum_passes_where_a_row_says_so(mesh):
    dtensor_ext.register(SCALE, name="test.scale")(by_rows)
    x = rows(torch.ones(8, 3), mesh, Partial("sum"))
    assert SCALE(x, rows(torch.ones(8), mesh, Replicate())).placements == (Partial("sum"),)


def test_uneven_shards_stay_only_if_the_rule_allows_them(mesh):
    x = torch.ones(3, 5)
    dtensor_ext.register(PAD, name="test.pad", static_args=["count"], uneven=True)(pad_by_rows)
    assert PAD(rows(x, mesh), 2).placements == (Shard(0),)
    dtensor_ext.unregister("test.pad")
    dtensor_ext.register(PAD, name="test.pad", static_args=["count"])(pad_by_rows)
    assert PAD(rows(x, mesh), 2).placements == (Replicate(),)


def test_a_static_argument_is_part_of_the_key(mesh):
    dtensor_ext.register(PAD, name="test.pad", static_args=["count"])(pad_by_rows)
    x = rows(torch.ones(8, 3), mesh)
    assert [tuple(PAD(x, n).shape) for n in (1, 4, 1, 2)] == [(8, 4), (8, 7), (8, 4), (8, 5)]


def test_without_it_the_first_shape_is_reused(mesh):
    """The control for the test above: the argument, not luck, is what tells the calls apart."""
    dtensor_ext.register(PAD, name="test.pad")(pad_by_rows)
    x = rows(torch.ones(8, 3), mesh)
    assert [tuple(PAD(x, n).shape) for n in (1, 4)] == [(8, 4), (8, 4)]


@pytest.mark.parametrize("allowed", [True, False])
def test_validity_is_asked_with_the_whole_mesh(mesh, allowed):
    asked = []

    def is_valid(op, args, kwargs, inputs, output):
        asked.append((op, tuple(inputs[0].mesh.shape), tuple(output.shape)))
        return allowed or output.placements == (Replicate(),)

    dtensor_ext.register(PAD, name="test.pad", static_args=["count"], is_valid=is_valid)(pad_by_rows)
    got = PAD(rows(torch.ones(8, 3), mesh), 2)
    assert got.placements == ((Shard(0) if allowed else Replicate()),)
    assert (PAD, (4,), (8, 5)) in asked


def test_a_name_is_taken_once():
    dtensor_ext.register(SCALE, name="test.one")(by_rows)
    with pytest.raises(ValueError, match=r"'test\.one' is already registered"):
        dtensor_ext.register(PAD, name="test.one")(pad_by_rows)


def test_an_op_has_one_rule():
    dtensor_ext.register(SCALE, name="test.one")(by_rows)
    with pytest.raises(ValueError, match=r"scale_rows.* already has rule 'test\.one'"):
        dtensor_ext.register([PAD, SCALE], name="test.two")(by_rows)
    assert "test.two" not in {i.name for i in dtensor_ext.rules()}


def test_what_is_not_an_overload_is_a_type_error():
    for op in (torch.ops.dtensor_ext_test.scale_rows, scale_rows, "aten::view"):
        with pytest.raises(TypeError, match="is not an overload"):
            dtensor_ext.register([op], name="test.no")(by_rows)


def test_a_rule_of_no_op_and_one_of_an_unknown_argument_are_value_errors():
    with pytest.raises(ValueError, match="names no op"):
        dtensor_ext.register([], name="test.no")(by_rows)
    with pytest.raises(ValueError, match="has no argument 'cuont'"):
        dtensor_ext.register(PAD, name="test.no", static_args=["cuont"])(pad_by_rows)


def test_a_failed_registration_leaves_nothing(mesh):
    before = dtensor_ext.rules()
    with pytest.raises(ValueError, match="already has rule"):
        dtensor_ext.register([SCALE, torch.ops.aten.view.dtype], name="test.two")(by_rows)
    assert dtensor_ext.rules() == before
    assert not works(mesh)


def test_out_of_its_range_of_versions_a_rule_is_listed_and_not_active(mesh):
    dtensor_ext.register(SCALE, name="test.old", torch="<2.13")(by_rows)
    assert not info("test.old").active
    assert "not active" in str(info("test.old"))
    assert not works(mesh)


def test_a_range_that_cannot_be_read_is_an_error_and_registers_nothing():
    before = dtensor_ext.rules()
    with pytest.raises(ValueError, match="is not a version range"):
        dtensor_ext.register(SCALE, name="test.range", torch="2.13+")(by_rows)
    assert dtensor_ext.rules() == before


def test_version_ranges_are_those_of_the_running_torch():
    major, minor = (int(n) for n in torch.__version__.split(".")[:2])
    assert torch_in(f">={major}.{minor}")
    assert torch_in(f">={major}.{minor - 1}, <{major}.{minor + 1}")
    assert not torch_in(f"<{major}.{minor}")
    assert not torch_in(f">={major}.{minor + 1}")
    assert torch_in("")


@pytest.mark.parametrize("with_validity", [True, False])
def test_a_row_of_the_wrong_length_is_a_clear_error(mesh, with_validity):
    def short(op, args_schema, kwargs_schema):
        return [[Shard(0), Shard(0)]]

    is_valid = (lambda *a: True) if with_validity else None
    dtensor_ext.register(SCALE, name="test.short", is_valid=is_valid)(short)
    with pytest.raises(
        RuntimeError, match=r"expected 3 .* for \S*scale_rows|'test\.short': \S*scale_rows.*3 placements"
    ):
        SCALE(rows(torch.ones(8, 3), mesh), rows(torch.ones(8), mesh))


def test_unregister_takes_the_rule_away_and_twice_is_a_key_error(mesh):
    dtensor_ext.register(SCALE, name="test.scale")(by_rows)
    assert works(mesh)
    dtensor_ext.unregister("test.scale")
    assert not works(mesh)
    assert "test.scale" not in {i.name for i in dtensor_ext.rules()}
    with pytest.raises(KeyError):
        dtensor_ext.unregister("test.scale")


def test_a_rule_registered_while_uninstalled_comes_with_the_next_install(mesh):
    dtensor_ext.uninstall()
    dtensor_ext.register(SCALE, name="test.scale")(by_rows)
    assert not info("test.scale").active
    assert not works(mesh)
    dtensor_ext.install()
    assert info("test.scale").active
    assert works(mesh)


def test_an_unregistered_rule_does_not_come_back_with_install(mesh):
    dtensor_ext.register(SCALE, name="test.scale")(by_rows)
    dtensor_ext.uninstall()
    dtensor_ext.unregister("test.scale")
    dtensor_ext.install()
    assert not works(mesh)


def test_every_rule_of_ours_says_what_it_is_for():
    for rule in dtensor_ext.rules():
        assert rule.active, rule
        assert rule.torch, rule
        assert len(rule.reason) > 40, rule
        assert rule.rule.mathematics, rule
        assert rule.rule.core_file.startswith("torch/distributed/tensor/"), rule
