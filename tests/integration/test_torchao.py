"""torchao's stochastic-rounding optimizers, unmodified, on shards.

Two versions: the one in the environment, whose rounding helper unwraps DTensors and draws the local shape, and 0.7.0,
whose helper is the one of the original reports and draws the global shape. The second is installed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torchao_programs as programs
from ranks import run_ranks

NAMES = ["_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"]
LAYOUTS = ["fsdp", "hsdp", "tp", "plain"]


@pytest.fixture(scope="module")
def torchao_07(tmp_path_factory):
    """The folder of torchao 0.7.0: DTENSOR_EXT_TORCHAO_07 if set, else installed into a temporary one."""
    path = os.environ.get("DTENSOR_EXT_TORCHAO_07")
    if not path:
        path = str(tmp_path_factory.mktemp("torchao07"))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", path, "torchao==0.7.0"]
        subprocess.run(command, check=True)
    return path


@pytest.fixture(params=["installed", "0.7.0"])
def version(request):
    """The path to put first, or None for the installed version."""
    return None if request.param == "installed" else request.getfixturevalue("torchao_07")


def test_every_optimizer_steps_on_one_device(version):
    seen = run_ranks(programs.train, 1, version, NAMES, ["one"], 2, True)[0]
    assert seen == {(name, "one"): 0 for name in NAMES}


def test_copies_agree_after_20_steps(version):
    for seen in run_ranks(programs.train, 4, version, NAMES, LAYOUTS, 20, True):
        assert seen == {(name, layout): 0 for name in NAMES for layout in LAYOUTS}


def test_bare_torch_stops_or_drifts_with_the_installed_version():
    for seen in run_ranks(programs.train, 4, None, ["_AdamW", "AdamW8bit"], LAYOUTS, 20, True, bare=True):
        for layout in ("hsdp", "tp", "plain"):
            assert isinstance(seen["_AdamW", layout], int), seen
            assert seen["_AdamW", layout] > 0, layout
        for layout in LAYOUTS:
            assert "expected dtype torch.bfloat16 for `end`" in seen["AdamW8bit", layout]


def test_bare_torch_stops_with_torchao_07(torchao_07):
    for seen in run_ranks(programs.train, 4, torchao_07, NAMES, LAYOUTS, 2, True, bare=True):
        for name in NAMES:
            for layout in LAYOUTS:
                assert "mixed torch.Tensor and DTensor" in seen[name, layout]


def test_the_07_helper_gives_one_devices_bits_in_eager(torchao_07):
    layouts = ["one", "fsdp", "hsdp", "tp"]
    for seen in run_ranks(programs.bits, 4, torchao_07, layouts, 5, True):
        for layout in layouts[1:]:
            assert all(map(torch.equal, seen["one"], seen[layout])), layout


def test_the_07_helper_gives_one_devices_bits_compiled_on_one_cache_folder_cold_and_warm(torchao_07, tmp_path):
    """Each layout in processes of its own: on one folder, what one of them compiled is offered to the others."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    one = run_ranks(programs.bits, 1, torchao_07, ["one"], 2, False, env=env, seconds=200)[0]["one"]
    # The last one finds what the first three have left there.
    for layout in ("fsdp", "hsdp", "tp", "hsdp"):
        for seen in run_ranks(programs.bits, 4, torchao_07, [layout], 2, False, env=env, seconds=200):
            assert all(map(torch.equal, one, seen[layout])), layout


def test_compiled_optimizers_run_one_after_the_other_on_one_cache_folder(tmp_path):
    """Core's key misses the local tensor's class, and AdamWFp8 then runs the graph of AdamW8bit."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit"):
        for seen in run_ranks(programs.train, 2, None, [name], ["fsdp"], 2, False, env=env, seconds=200):
            assert seen == {(name, "fsdp"): 0}


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", NAMES)
def test_every_compiled_optimizer_on_every_layout(version, name, tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for seen in run_ranks(programs.train, 4, version, [name], LAYOUTS, 20, False, env=env, seconds=900):
        assert seen == {(name, layout): 0 for layout in LAYOUTS}
