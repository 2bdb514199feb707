"""Builds the site's pages from the repository: a hook of mkdocs, named in mkdocs.yml.

Documents link to files by their paths in the repository, where they are readable, too. The hook
adds the pages and figures from outside docs/, turns links to them into links between pages, and
turns links to other files into links to the repository. Formulas become MathML, which browsers
show without a script.
"""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Where a page or figure comes from, by its place in the site.
SOURCES = {
    "index.md": "README.md",
    "results.md": "experiments/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
for pattern, folder in (
    ("notebooks/*.ipynb", "notebooks"),
    ("experiments/figures/*", "figures"),
):
    SOURCES |= {
        f"{folder}/{p.name}": f"{p.relative_to(ROOT)}" for p in sorted(ROOT.glob(pattern))
    }
PLACES = {source: place for place, source in SOURCES.items()}

# The target and the anchor of a link to a file.
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])</\1>', re.DOTALL
)


@event_priority(100)  # before notebooks become pages
def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    for place, source in SOURCES.items():
        files.append(File.generated(config, place, abs_src_path=f"{ROOT / source}"))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Returns the text with links that work in the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def resolved(link: re.Match[str]) -> str:
        target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PLACES or path.startswith("docs/"):
            place = PLACES.get(path, path.removeprefix("docs/"))
            return posixpath.relpath(place, posixpath.dirname(here)) + anchor
        if (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{config.repo_url}/{kind}/main/{path}{anchor}"
        return link[0]  # a notebook's picture; of any other mkdocs says that it is missing

    return LINK.sub(resolved, markdown)


def on_page_content(content: str, /, **_: Any) -> str:
    """Returns the page with MathML in place of LaTeX."""

    def mathml(formula: re.Match[str]) -> str:
        _, inline, block = formula.groups()
        tex = html.unescape(inline or block)
        return convert(tex, display="inline" if inline else "block")

    return FORMULA.sub(mathml, content)
