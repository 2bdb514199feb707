"""Builds the site's pages from the repository: a hook of mkdocs, named in mkdocs.yml.

Documents link to files by their paths in the repository, where they are readable, too. The hook
adds the pages and figures from outside docs/, turns links to them into links between pages, and
turns links to other files into links to the repository. Each experiment gets a page of its own.
Formulas become MathML, which browsers show without a script.

The hook refuses code wider than the page, and pages that make a browser ask another host.
"""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = "experiments/README.md"
# An experiment in RESULTS: the name, the question, and the rest.
SECTION = re.compile(r"^## (\w+)\n\n(.+?\?) (.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
EXPERIMENTS = {
    name: f"# {asked}\n\n{text}\nSettings and versions: [{name}.json](results/{name}.json).\n"
    for name, asked, text in SECTION.findall((ROOT / RESULTS).read_text(encoding="utf-8"))
}
# The source of each page or figure, by its place in the site.
SOURCES = {
    "index.md": "README.md",
    "results/index.md": RESULTS,
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
} | {f"results/{name}.md": f"{RESULTS}#{name}" for name in EXPERIMENTS}
for pattern, folder in (
    ("notebooks/*.ipynb", "notebooks"),
    ("experiments/figures/*", "figures"),
):
    SOURCES |= {
        f"{folder}/{p.name}": f"{p.relative_to(ROOT)}" for p in sorted(ROOT.glob(pattern))
    }
PLACES = {source: place for place, source in SOURCES.items()}

# The target and the anchor of a link to a file, or to another place in the same one.
LINK = re.compile(r"(?<=\]\()(?!\w+:|/)([^)#\s]*)(#[^)\s]*)?(?=\))")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\(?:\((.*?)\\\)|\[(.*?)\\\])</\1>', re.DOTALL
)
CODE = re.compile(r"<pre[^>]*>(.*?)</pre>", re.DOTALL)
COLUMNS = 88  # of code, in a window of 1280 pixels
# Requests of a browser by itself; the theme's "source" asks for the stars of the repository.
REQUEST = re.compile(
    r'(?:\ssrc=|<link rel="(?:stylesheet|preconnect)" href=)["\'](?:https?:)?//[^"\']*'
    r'|data-md-component="?source'
)


@event_priority(100)  # before notebooks become pages
def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Adds the pages and figures from outside docs/."""
    for place, source in SOURCES.items():
        path, _, section = source.partition("#")
        if section:
            file = File.generated(config, place, content=EXPERIMENTS[section])
        elif path == RESULTS:
            overview = SECTION.sub("", (ROOT / path).read_text(encoding="utf-8"))
            file = File.generated(config, place, content=overview)
        else:
            file = File.generated(config, place, abs_src_path=f"{ROOT / path}")
        files.append(file)
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Returns the text with links that work in the site."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}").partition("#")[0]
    if here.startswith("api/"):
        page.meta["search"] = {"boost": 4}  # a name is found first where it is defined
    if source.endswith(".ipynb"):
        title, _, text = markdown.partition("\n\n")
        name = posixpath.basename(source)
        link = f"This page as a notebook: [{name}]({config.repo_url}/blob/main/{source})"
        markdown = f"{title}\n\n{link}\n\n{text}"

    def resolved(link: re.Match[str]) -> str:
        target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        path = path if target else source
        if path + anchor in PLACES:  # a section that is a page
            return posixpath.relpath(PLACES[path + anchor], posixpath.dirname(here))
        if path in PLACES or path.startswith("docs/"):
            place = PLACES.get(path, path.removeprefix("docs/"))
            return posixpath.relpath(place, posixpath.dirname(here)) + anchor
        if (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{config.repo_url}/{kind}/main/{path}{anchor}"
        return link[0]  # a notebook's picture; mkdocs reports any other link as missing

    return LINK.sub(resolved, markdown)


def on_page_content(content: str, /, *, page: Page, **_: Any) -> str:
    """Returns the page with MathML in place of LaTeX.

    **Raises:** `PluginError` for code that is wider than the page.
    """
    for code in CODE.findall(content):
        for line in html.unescape(re.sub(r"<[^>]+>", "", code)).splitlines():
            if len(line) > COLUMNS:
                wide = f"{page.file.src_uri}: more than {COLUMNS} columns of code:\n{line}"
                raise PluginError(wide)

    def mathml(formula: re.Match[str]) -> str:
        _, inline, block = formula.groups()
        tex = html.unescape(inline or block)
        return convert(tex, display="inline" if inline else "block")

    return FORMULA.sub(mathml, content)


def on_post_page(output: str, /, *, page: Page, **_: Any) -> None:
    """Raises `PluginError` for a page that makes a browser ask another host."""
    request = REQUEST.search(output)
    if request:
        raise PluginError(f"{page.file.src_uri} asks another host: {request[0]}")
