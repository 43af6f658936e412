"""Runs somebody's script, unchanged, with the extension imported first.

``python -m dtensor_ext run script.py --its --options``, or one process a GPU with
``torchrun --nproc-per-node 8 -m dtensor_ext run script.py``. Importing this module has imported the extension.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence

USAGE = """\
usage: dtensor-ext run script.py [arguments ...]
       dtensor-ext run -m module [arguments ...]

Runs the script or module as python would, with dtensor_ext imported first. All that follows its name is its own.
Processes that it spawns itself (torch.multiprocessing.spawn) start without the extension: import dtensor_ext in the
function that they run.
"""


def run(argv: Sequence[str]) -> int:
    """Run ``argv``, a script or ``-m`` and a module, then its arguments, as ``__main__``.

    What the script raises goes through, ``SystemExit`` too, so its exit code is the process's. Returns 0 when it ends,
    2 when there is nothing to run.
    """
    if not argv:
        return _refuse("name a script or a module to run")
    first, *rest = argv
    if first in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if first == "-m":
        return _run_module(rest[0], rest[1:]) if rest else _refuse("-m needs the name of a module")
    if first == "--":
        return _run_script(rest[0], rest[1:]) if rest else _refuse("name a script to run")
    if first.startswith("-"):
        return _refuse(f"unknown option {first!r}: options of the script stand after its name")
    return _run_script(first, rest)


def _run_script(script: str, arguments: list[str]) -> int:
    if not os.path.exists(script):
        return _refuse(f"there is no script {script!r} in {os.getcwd()!r}: check its path")
    sys.argv = [script, *arguments]
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        # A folder or an archive with a __main__ in it: runpy itself puts it in front.
        _first_on_path(None)
        runpy.run_path(script, run_name="__main__")
        return 0
    _first_on_path(os.path.dirname(os.path.realpath(script)))
    # Not runpy for a file: it makes argv[0] and __file__ the same, where python leaves the one as it was typed and
    # makes the other absolute, and it takes the module away before exit handlers run.
    file = os.path.abspath(script)
    with io.open_code(file) as f:
        code = compile(f.read(), file, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
    return 0


def _run_module(name: str, arguments: list[str]) -> int:
    _first_on_path(os.getcwd())
    if not _module_exists(name):
        return _refuse(f"there is no module {name!r}: install it, or start from the folder that holds it")
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as e:
        # A parent package is missing. What a parent fails to import is another matter, and the user's to see.
        if e.name is not None and f"{name}.".startswith(f"{e.name}."):
            return False
        raise
    except ValueError:
        # A name such as "" or "a..b".
        return False


def _first_on_path(folder: str | None) -> None:
    """Put `folder` where python put the folder that this program was started from; with None only take that away."""
    if getattr(sys.flags, "safe_path", False):
        # Python was told to put no folder there (-P, PYTHONSAFEPATH).
        return
    sys.path[:1] = [] if folder is None else [folder]


def _refuse(why: str) -> int:
    print(f"dtensor-ext run: {why}.\n\n{USAGE}", end="", file=sys.stderr)
    return 2
