"""A hook of mkdocs: links of a page to files of the repository lead to the page that includes the file, or to a copy.

The site has no address of a repository to link to. README.md and other included files link files that are no pages:
those get a copy below `files/`. A link to a folder leads to its README.md; if it has none, the words stay and the link
goes.
"""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent
COPIES = "files"
_INCLUDE = re.compile(r'include-(?:markdown|notebook) "([^"]+)"')
_LINK = re.compile(r'<a\b([^>]*?) href="([^"]*)"([^>]*)>(.*?)</a>', re.DOTALL)
_IMAGE = re.compile(r'(<img\b[^>]*? src=")([^"]*)(")')
_copied: set[Path] = set()


def on_page_content(content: str, page: Any, files: Any, **_: Any) -> str:
    """Give the links of one page their targets."""
    source = ROOT / "docs" / page.file.src_uri

    def target(link: str) -> str | None:
        """The address for a link to a file outside docs/; the link itself if it is none; None for a bare folder."""
        path, hash_, anchor = html.unescape(link).partition("#")
        if not path or re.match(r"[a-z]+:|//|/", path):
            return link
        found = (source.parent / path).resolve()
        if not found.is_relative_to(ROOT) or found.is_relative_to(ROOT / "docs") or not found.exists():
            return link
        if found.is_dir():
            found /= "README.md"
        if not found.is_file():
            return None
        url = _included(files).get(found)
        if url is None:
            _copied.add(found)
            url, hash_ = f"{COPIES}/{found.relative_to(ROOT)}", ""
        return html.escape(get_relative_url(url, page.url) + (hash_ + anchor if hash_ else ""))

    def linked(match: re.Match[str]) -> str:
        before, link, behind, words = match.groups()
        address = target(link)
        return words if address is None else f'<a{before} href="{address}"{behind}>{words}</a>'

    content = _LINK.sub(linked, content)
    return _IMAGE.sub(lambda match: f"{match[1]}{target(match[2]) or match[2]}{match[3]}", content)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy what pages link."""
    for path in sorted(_copied):
        copy = Path(config.site_dir, COPIES, path.relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _included(files: Any) -> dict[Path, str]:
    """Which page has the text of which file outside docs/."""
    found = {}
    for file in files.documentation_pages():
        source = ROOT / "docs" / file.src_uri
        for name in _INCLUDE.findall(source.read_text(encoding="utf-8")):
            found[(source.parent / name).resolve()] = file.url
    return found
