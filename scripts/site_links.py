"""Links of the site's pages to files outside docs/, which become links to the repository: a hook of mkdocs.yml."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<=\]\()(?P<target>(?!\w+:)[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
"""Target of a link in Markdown that is relative."""

SHOWN = (".md", ".svg")
"""Files of docs/ that the site has."""


def on_page_markdown(markdown: str, page: Any, config: Any, **others: Any) -> str:
    """Text of a page whose links all lead to pages of the site, or to the main branch of `repo_url`."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(f"{folder}/{link['target']}")
        if path.startswith("docs/") and path.endswith(SHOWN):
            return link[0]
        return f"{config.repo_url}/blob/main/{path}{link['anchor'] or ''}"

    return LINK.sub(outside, markdown)
