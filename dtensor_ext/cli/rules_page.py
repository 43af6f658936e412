"""Writes the rule reference, docs/rules.md, from the registry."""

from __future__ import annotations

from collections.abc import Iterable

from ..registry import RuleInfo

_HEAD = """\
# Rules

Made from the registry: `python -m dtensor_ext rules --markdown > docs/rules.md`.
"""


def rules_page(rules: Iterable[RuleInfo]) -> str:
    """The reference as Markdown: for each rule its ops, why it is there, what is in its cache key, its mathematics."""
    parts = [_HEAD]
    for info in rules:
        rule = info.rule
        lines = [
            f"## {rule.name}",
            "",
            ", ".join(f"`{op}`" for op in rule.ops),
            "",
            rule.reason,
            "",
            f"- torch: `{rule.torch or 'any'}`",
            f"- in core: `{rule.core_file or 'none'}`",
            f"- in the cache key: {', '.join(f'`{a}`' for a in rule.static_args) or 'nothing'}",
            f"- uneven and empty shards: {'yes' if rule.uneven else 'no'}",
            "",
            "```text",
            rule.mathematics.strip(),
            "```",
            "",
        ]
        parts.append("\n".join(lines))
    return "\n".join(parts)
