"""Every link of the built documentation leads to a page, a file or a heading that is there.

python docs/check_site.py site       # `make docs` runs it; ends with 1 and a line for each dead link
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            elif value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """`page: link` of each link inside `site` that leads nowhere. Links to other hosts are not followed."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    dead = [] if pages else [f"{site}: no page was built"]
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, since any folder may show it
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = target not in pages or not anchor or anchor in pages[target].anchors or anchor.startswith("__")
            if not target.is_relative_to(site) or not target.exists() or not known:
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


if __name__ == "__main__":
    found = dead_links(Path(sys.argv[1]))
    print("\n".join(found) or "no dead link")
    sys.exit(1 if found else 0)
