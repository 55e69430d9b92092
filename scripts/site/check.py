"""Check a built site: every link and anchor inside it leads somewhere, and nothing is loaded from elsewhere.

Usage: python scripts/site/check.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
HINTS = {"canonical", "next", "prev"}  # `<link>`s that no browser loads


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        if tag in LOADED and LOADED[tag] in found and found.get("rel") not in HINTS:
            self.loads.add(found[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """What is wrong, a line for each."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{name} loads {link}")
                continue
            start = site.resolve() if parts.path.startswith("/") else path.parent  # 404.html has no place of its own
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file():
                found.append(f"{name} links to {link}: no such file")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{name} links to {link}: no such anchor")
    return found


def main(site: Path) -> int:
    found = faults(site)
    pages = len(list(site.rglob("*.html")))
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print("\n".join([*found, f"{pages} pages, {size / 1e6:.1f} MB, {len(found)} faults: {site / 'index.html'}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
