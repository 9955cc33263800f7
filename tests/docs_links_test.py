# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links between the pages lead somewhere, and the API reference has every public name."""

import inspect
import os
import pathlib
import re

import pytest

import dice_tf
from dice_tf import engine

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
         *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "benchmarks").glob("*.md"))]  # fmt: skip
REFERENCE = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.rst"))


def prose(page):
    """Returns the text of a page without its code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda match: re.sub(r"[\[\]()]", "_", match[0]), text)


def links(page):
    """Returns pairs of a target and an anchor, or `None`, of the links that leave no network."""
    found = re.findall(r"\]\(\s*<?([^)\s>]*)", prose(page))
    found += re.findall(r"(?:href|src)=\"([^\"]*)\"", prose(page))
    found += re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose(page), re.MULTILINE)
    local = [link for link in found if not re.match(r"[a-z]+:", link)]
    return [
        (target, anchor or None) for target, _, anchor in (link.partition("#") for link in local)
    ]


def destination(page, target):
    """Returns the file that a link leads to; links in the file system are not followed."""
    return pathlib.Path(os.path.normpath(page.parent / target)) if target else page


def anchors(page):
    """Returns the anchors that a git host gives to the headings of a page."""
    code = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    slugs = []
    for title in re.findall(r"^#+ (.*)$", code, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return set(slugs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in links(page):
        file = destination(page, target)
        assert file.is_relative_to(ROOT) and file.exists(), (target, anchor)
        if anchor:
            assert anchor in anchors(file), (target, anchor)


def test_links_are_found():
    counts = {str(page.relative_to(ROOT)): len(links(page)) for page in PAGES}
    assert min(counts[name] for name in ("README.md", "docs/index.md", "docs/privacy.md")) >= 10
    assert any(anchor for _, anchor in links(ROOT / "docs" / "user_guide.md"))


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    reached = {index} | {destination(index, target) for target, _ in links(index)}
    assert set(PAGES) - reached == {ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}


def defined_in(module):
    """Returns the names that a module defines for others."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def test_the_reference_has_every_public_name():
    modules = [name for name in dice_tf.__all__ if inspect.ismodule(getattr(dice_tf, name))]
    names = set(dice_tf.__all__) - set(modules) - {"__version__"}
    names |= {name for name in vars(dice_tf.accounting) if not name.startswith("_")
              and not inspect.ismodule(getattr(dice_tf.accounting, name))}  # fmt: skip
    names |= set(engine.__all__) | set(defined_in(dice_tf.auditing))
    names |= {"DiceSumQuery", "import_tensorflow_privacy"}
    assert len(names) > 35
    documented = set(
        re.findall(r"^\.\. (?:auto\w+|data):: (?:\w+\.)*(\w+)$", REFERENCE, re.MULTILINE)
    )
    assert names - documented == set()
    # These pages take in all that the module has.
    for module in ("errors", "canaries"):
        assert f"automodule:: dice_tf.{module}\n   :members:" in REFERENCE
    assert set(modules) == {"accounting", "auditing", "canaries", "errors"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
