"""The demo trains for real: bare PyTorch fails or drifts where the table says so, the extension does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtensor_ext
from dtensor_ext.cli.demo_rows import LAYOUTS

ROOT = Path(dtensor_ext.__file__).parents[1]
COLUMNS = ("optimizer", "layout", "bare", "bare_copies", "bare_loss", "ours", "copies", "loss")


def demo(*options, folder=None):
    """The exit code of the demo, its table as dicts, and all that it printed."""
    path = os.pathsep.join(filter(None, [folder and str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "dtensor_ext", "demo", *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    printed = done.stdout + done.stderr
    _, ruled, body = done.stdout.partition("---------")
    assert ruled, printed
    lines = [re.split(r" {2,}", line) for line in body.split("\n\n")[0].splitlines()[1:]]
    return done.returncode, [dict(zip(COLUMNS, line, strict=True)) for line in lines], printed


def test_one_of_torchaos_optimizers():
    pytest.importorskip("torchao")
    code, rows, printed = demo("--only", "_AdamW", "--steps", "4")
    assert code == 0, printed
    assert "force_eager" in printed
    assert [row["layout"] for row in rows] == list(LAYOUTS), printed
    for row in rows:
        assert row["ours"] == "ran", printed
        assert row["copies"].startswith("equal"), printed
        if row["layout"] != "FSDP2":
            # The control: the same training on bare PyTorch. There it runs, and the copies drift apart.
            assert row["bare"] == "ran", printed
            assert row["bare_copies"].endswith("DIFFER"), printed
            assert "no copies" not in row["copies"], printed


def test_without_torchao_the_optimizer_written_by_hand_is_left(tmp_path):
    # As if it were not installed, in every process.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torchao'] = None\n")
    code, rows, printed = demo("--steps", "4", folder=tmp_path)
    assert code == 0, printed
    by_hand = [row for row in rows if row["optimizer"] == "SRSGD"]
    assert [row["layout"] for row in by_hand] == list(LAYOUTS), printed
    for row in by_hand:
        # The control: core cannot mix the helper's noise with the DTensor at all.
        assert "got mixed" in row["bare"], printed
        assert row["ours"] == "ran", printed
        assert row["copies"].startswith("equal"), printed
    others = [row for row in rows if row["optimizer"] != "SRSGD"]
    assert len(others) == 16, printed
    assert all(row["bare"] == row["ours"] == "torchao is not installed" for row in others), printed
