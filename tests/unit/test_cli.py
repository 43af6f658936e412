"""The command line: ``run`` is as good as python itself, ``rules`` lists, the demo's verdict is honest."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtensor_ext
from dtensor_ext.cli import run
from dtensor_ext.cli.demo_rows import LAYOUTS, OPTIMIZERS, Result, complaint, matrix, shorten, table, verdict
from dtensor_ext.cli.main import main

ROOT = Path(dtensor_ext.__file__).parents[1]

# Says what it sees; `helper` lies next to it, as scripts' own modules do.
SCRIPT = """
import json, os, sys
import helper
loaded = sys.modules.get("dtensor_ext")
seen = {
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "installed": loaded is not None and loaded.is_installed(),
}
rank = os.environ.get("RANK", "0")
with open(os.environ["SEEN"] + rank, "w") as f:
    json.dump(seen, f)
if "WORLD_SIZE" in os.environ:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(x)
    assert x.item() == 3, x
    dist.destroy_process_group()
else:
    sys.exit(7)
"""
# What must reach the script as it is: each of these means something to argparse.
ARGUMENTS = ["--help", "-m", "--only=x", "--", "a b", "--version", "-h"]


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "of the user"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def python(*arguments, cwd, **env):
    """Runs python from `cwd`, with the package on its path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    full = {**os.environ, "PYTHONPATH": path, "SEEN": str(cwd / "seen"), **env}
    for name in ("RANK", "WORLD_SIZE", "DTENSOR_EXT_DISABLE"):
        if name not in env:
            full.pop(name, None)
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=full, capture_output=True, text=True, timeout=120
    )


def seen(folder, rank=0):
    return json.loads((folder / f"seen{rank}").read_text())


def test_run_is_as_python_with_the_extension_imported(script, tmp_path):
    # A relative path: python leaves argv[0] as it is, and makes __file__ absolute.
    script = script.relative_to(tmp_path)
    plain = python(script, *ARGUMENTS, cwd=tmp_path)
    assert plain.returncode == 7, plain.stderr
    expected = seen(tmp_path)
    assert expected["argv"] == [str(script), *ARGUMENTS]
    # The control: without us the extension is not there.
    assert not expected["installed"]

    ours = python("-m", "dtensor_ext", "run", script, *ARGUMENTS, cwd=tmp_path)
    assert ours.returncode == 7, ours.stderr
    assert seen(tmp_path) == {**expected, "installed": True}


def test_run_module_is_as_python(script, tmp_path):
    plain = python("-m", "script", *ARGUMENTS, cwd=script.parent)
    assert plain.returncode == 7, plain.stderr
    expected = seen(script.parent)
    ours = python("-m", "dtensor_ext", "run", "-m", "script", *ARGUMENTS, cwd=script.parent)
    assert ours.returncode == 7, ours.stderr
    assert seen(script.parent) == {**expected, "installed": True}


def test_run_respects_disable_and_shows_the_scripts_own_error(tmp_path):
    (tmp_path / "s.py").write_text(
        "import dtensor_ext\nassert not dtensor_ext.is_installed()\nraise KeyError('mine')\n"
    )
    done = python("-m", "dtensor_ext", "run", "s.py", cwd=tmp_path, DTENSOR_EXT_DISABLE="1")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert 's.py", line 3' in done.stderr


def test_run_folder_with_main(tmp_path, monkeypatch, capsys):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("import beside, sys; print(beside.x, sys.argv[1:], __name__)")
    (tmp_path / "program" / "beside.py").write_text("x = 'found'")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    assert main(["run", str(tmp_path / "program"), "--help"]) == 0
    assert capsys.readouterr().out == "found ['--help'] __main__\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no/such.py", "--help"], "there is no script 'no/such.py'"),
        (["-m", "no_such_module_here"], "there is no module 'no_such_module_here'"),
        (["-m", "no_such_package.module"], "there is no module 'no_such_package.module'"),
        (["-m"], "-m needs the name of a module"),
        (["--fast", "script.py"], "unknown option '--fast'"),
        (["--"], "name a script"),
        ([], "name a script"),
    ],
)
def test_run_refuses(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert "usage: dtensor-ext run" in printed.err


def test_missing_script_is_exit_code_2_of_the_process(tmp_path):
    done = python("-m", "dtensor_ext", "run", "absent.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no script 'absent.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_package_fails_to_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("import absent_dependency")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        run.run(["-m", "broken_package.module"])


def test_help_of_run_itself(capsys):
    assert main(["run", "--help"]) == 0
    assert capsys.readouterr().out == run.USAGE


def test_torchrun(script, tmp_path):
    done = python(
        *("-m", "torch.distributed.run", "--nproc-per-node", 2),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("-m", "dtensor_ext", "run", script, *ARGUMENTS),
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = seen(tmp_path, rank)
        assert found["argv"] == [str(script), *ARGUMENTS]
        assert found["installed"]
        assert found["name"] == "__main__"


def test_rules_lists_one_a_line(capsys):
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [str(r) for r in dtensor_ext.rules()]
    assert len(lines) >= 1


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


# --- the demo's verdict ---------------------------------------------------------------------------------------------

PASSED = Result(copied=10, differing=0, first_loss=1.0, final_loss=0.5)
SKIPPED = Result(skipped="torchao is not installed")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Result(error="RuntimeError: no strategy"), "no strategy"),
        (Result(copied=10, differing=1, first_loss=1.0, final_loss=0.5), "1 of 10 weights differ"),
        (Result(copied=10, first_loss=1.0, final_loss=1.0), "did not go down"),
        (Result(copied=10, first_loss=1.0, final_loss=math.nan), "did not go down"),
        (Result(), "did not go down"),
    ],
)
def test_demo_fails_with_one_bad_row(bad, why):
    assert why in complaint(bad)
    assert verdict([PASSED, bad, PASSED]) == 1


def test_demo_passes():
    assert complaint(PASSED) == complaint(SKIPPED) == ""
    assert verdict([PASSED, PASSED]) == 0
    assert verdict([SKIPPED, PASSED]) == 0


def test_demo_that_tried_nothing_has_not_passed():
    assert verdict([SKIPPED, SKIPPED]) == 1
    assert verdict([]) == 1


def test_demo_rows():
    assert len(matrix()) == len(OPTIMIZERS) * len(LAYOUTS)
    assert {o for o, _ in matrix("_adamw")} == {"_AdamW"}
    assert {o for o, _ in matrix("8BIT")} == {"AdamW8bit"}
    assert matrix("no such") == []


def test_demo_refuses_an_unknown_optimizer_before_it_starts(capsys):
    assert main(["demo", "--only", "Lion"]) == 2
    assert "take from _AdamW" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--steps", "0"], ["--steps", "many"], ["--seed", "-1"]])
def test_demo_refuses_bad_numbers(option, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *option])
    assert stop.value.code == 2


def test_demo_table():
    rows = [("A", "x"), ("B", "y"), ("C", "z")]
    bare = [Result(error="RuntimeError: " + "long " * 40 + "\nsecond"), Result(copied=8, differing=3), SKIPPED]
    text = table(rows, bare, [PASSED, Result(first_loss=1.0, final_loss=0.25), SKIPPED])
    lines = text.splitlines()
    assert len(lines) == 5
    assert "second" not in text
    assert shorten(bare[0].error) in lines[2]
    assert "equal (10)" in lines[2]
    assert "3 of 8 DIFFER" in lines[3]
    assert "equal (no copies)" in lines[3]
    assert "0.2500" in lines[3]
    assert lines[4].count("torchao is not installed") == 2
