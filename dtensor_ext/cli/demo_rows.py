"""The rows of the demo, what is found out about each, the table, and whether the demo passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BY_HAND = "SRSGD"
OPTIMIZERS = ("_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", BY_HAND)
LAYOUTS = ("FSDP2", "HSDP 2x2", "FSDP2 x TP 2x2", "distribute_tensor")

Row = tuple[str, str]


def matrix(only: str = "") -> list[Row]:
    """Every (optimizer, layout) whose optimizer's name contains `only`, in either case."""
    return [(o, layout) for o in OPTIMIZERS if only.lower() in o.lower() for layout in LAYOUTS]


@dataclass(frozen=True)
class Result:
    """What came of training one row on one side.

    Attributes:
        error: why it did not run to its end; empty if it did.
        skipped: why it was not tried; empty if it was.
        copied: how many weights more than one rank holds.
        differing: of how many of them the copies are not bitwise equal.
        first_loss, final_loss: before the first step and after the last, the mean over ranks.
    """

    error: str = ""
    skipped: str = ""
    copied: int = 0
    differing: int = 0
    first_loss: float = math.nan
    final_loss: float = math.nan

    @property
    def cells(self) -> tuple[str, str, str]:
        """As the table shows it: how it went, the copies, the final loss."""
        if self.skipped or self.error:
            return (shorten(self.skipped or self.error), "-", "-")
        if not self.copied:
            copies = "equal (no copies)"
        elif not self.differing:
            copies = f"equal ({self.copied})"
        else:
            copies = f"{self.differing} of {self.copied} DIFFER"
        return ("ran", copies, f"{self.final_loss:.4f}")


def shorten(text: str, width: int = 44) -> str:
    """The first line of `text`, cut to `width` characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= width else line[: width - 3] + "..."


def complaint(result: Result) -> str:
    """What is wrong with a row that should have passed; empty if nothing is, or if it could not be tried."""
    if result.skipped:
        return ""
    if result.error:
        return result.error
    if result.differing:
        return f"{result.differing} of {result.copied} weights differ between ranks that hold copies of them"
    # Written so that a loss that is not a number fails.
    if not result.final_loss < result.first_loss:
        return f"the loss did not go down: {result.first_loss:.4f} before, {result.final_loss:.4f} after"
    return ""


def verdict(extended: Sequence[Result]) -> int:
    """The demo's exit code, from the results of the side with the extension: 0 if every row that was tried passed.

    Nothing tried is no success.
    """
    tried = [r for r in extended if not r.skipped]
    return 0 if tried and not any(map(complaint, tried)) else 1


def table(rows: Sequence[Row], bare: Sequence[Result], extended: Sequence[Result]) -> str:
    """Both sides of every row as aligned text."""
    head = ("optimizer", "layout", "bare PyTorch", "copies", "loss", "with dtensor_ext", "copies", "loss")
    lines: list[tuple[str, ...]] = [
        head,
        *((*row, *b.cells, *e.cells) for row, b, e in zip(rows, bare, extended, strict=True)),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * w for w in widths))
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
