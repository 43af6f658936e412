"""What the pages promise is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import dtensor_ext
from dtensor_ext.cli.rules_page import rules_page

ROOT = Path(__file__).parents[2]
PACKAGE = [*ROOT.glob("dtensor_ext/**/*.py"), *ROOT.glob("strategies/**/*.py")]


def test_changelog_package_and_project_agree_on_the_version():
    version = dtensor_ext.__version__
    assert re.search(rf'^version = "{re.escape(version)}"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version


def test_the_rule_reference_is_the_registrys():
    assert (ROOT / "docs/rules.md").read_text() == rules_page(dtensor_ext.rules())


def test_only_compat_and_install_use_private_torch_modules():
    private = re.compile(r"^\s*(?:from|import) torch(?:\.\w+)*\._\w+", re.M)
    found = {p.name for p in PACKAGE if private.search(p.read_text())}
    assert found - {"registry.py"} <= {"compat.py", "install.py"}, found
    # The type of an overload, torch.ops.aten.x.y, has no public name.
    assert private.findall((ROOT / "dtensor_ext/registry.py").read_text()) == ["\nfrom torch._ops"]


def test_only_compat_asks_for_a_version():
    assert {p.name for p in PACKAGE if "torch.__version__" in p.read_text()} == {"compat.py"}


def test_every_public_name_is_documented():
    for name in dtensor_ext.__all__:
        assert getattr(dtensor_ext, name).__doc__, name


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
