"""The README's first command, run as it stands there. (CI is its second.)"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_first_command_of_the_readme_installs_and_runs_the_demo():
    commands = re.findall(r"^    (bash \.ci/\w+)$", (ROOT / "README.md").read_text(), re.M)
    assert commands == ["bash .ci/demo", "bash .ci/run"]
    # One optimizer and few steps: the whole demo is what a person runs.
    done = subprocess.run(
        f"{commands[0]} --only SRSGD --steps 4", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed in" in done.stdout
