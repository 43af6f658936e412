"""Parses the command line and calls what does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import dtensor_ext

from . import demo, run
from .rules_page import rules_page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dtensor-ext", description=dtensor_ext.__doc__)
    parser.add_argument("--version", action="version", version=f"dtensor-ext {dtensor_ext.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    shown = commands.add_parser(
        "demo",
        help="train small models on four CPU processes, without the extension and with it, and compare",
        description=demo.__doc__,
    )
    demo.add_arguments(shown)
    # Listed for the help only: `main` hands `run` over before argparse could take the script's options for its own.
    commands.add_parser("run", help="run a script or a module with the extension imported first", add_help=False)
    listed = commands.add_parser("rules", help="list the sharding rules, one a line")
    listed.add_argument("--markdown", action="store_true", help="the rule reference instead, as in docs/rules.md")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own by default). Returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["run"]:
        return run.run(argv[1:])
    options = _parser().parse_args(argv)
    if options.command == "rules":
        if options.markdown:
            print(rules_page(dtensor_ext.rules()), end="")
            return 0
        for rule in dtensor_ext.rules():
            print(rule)
        return 0
    return demo.demo(steps=options.steps, seed=options.seed, compiled=options.compile, only=options.only)
