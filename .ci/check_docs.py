"""Whether the documentation holds together: links, anchors, the site's table of contents.

Run by `make check`, with nothing but the standard library: `python .ci/check_docs.py [ROOT]`. It
prints a line a fault and exits with 1 where there is any. It knows the Markdown that is written
here: inline links and images, `#` headings, fences of three backticks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
START = "docs/index.md"
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_FENCE = re.compile(r"^(?P<fence> *```).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL)
_NAV_PAGE = re.compile(r"^ *- .*?([\w./-]+\.md) *$", re.MULTILINE)


def faults(root: Path) -> Iterator[str]:
    """What is wrong with the documentation of a repository, a sentence each."""
    root = root.resolve()
    pages = sorted((root / "docs").rglob("*.md"))
    links: dict[Path, set[Path]] = {}
    for page in [*(root / name for name in TOP_PAGES), *pages]:
        if not page.exists():
            yield f"{page.relative_to(root)}: is missing"
            continue
        links[page] = set()
        for link in _links(page):
            target, fault = _resolve(page, link)
            if fault:
                yield f"{page.relative_to(root)}: {link}: {fault}"
            elif target is not None:
                links[page].add(target)
    yield from _left_out(root, pages, links)


def _left_out(root: Path, pages: list[Path], links: dict[Path, set[Path]]) -> Iterator[str]:
    """Pages that the site's contents lack, or that no chain of links leads to."""
    docs = root / "docs"
    contents = (root / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = _NAV_PAGE.findall(contents)
    names = {page.relative_to(docs).as_posix() for page in pages}
    yield from (f"mkdocs.yml: nav lacks {name}" for name in sorted(names - set(listed)))
    yield from (f"mkdocs.yml: nav has no such page: {name}" for name in listed if name not in names)
    reached, ahead = set(), [root / START]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += links.get(page, set())
    for page in pages:
        if page not in reached:
            yield f"{page.relative_to(root)}: no chain of links from {START} leads here"


def _links(page: Path) -> list[str]:
    return _LINK.findall(_without_code(page.read_text("utf-8")))


def _without_code(text: str) -> str:
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", _FENCE.sub("", text))


def _resolve(page: Path, link: str) -> tuple[Path | None, str]:
    """The file that a relative link means, or what is wrong with it; neither for another site."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return None, ""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page.resolve()
    if not target.exists():
        return None, "no such file"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target):
        return None, "no such heading"
    return target, ""


def _anchors(page: Path) -> set[str]:
    """The names by which GitHub and mkdocs both know headings; where they differ, no link holds."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text("utf-8")))
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    plain = [re.sub(r"[^\w\s-]", "", text).strip() for text in words]
    return {
        name for text in plain if (name := text.replace(" ", "-")) == re.sub(r"[\s-]+", "-", text)
    }


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    found = list(faults(root))
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
