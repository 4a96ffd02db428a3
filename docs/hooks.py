"""What mkdocs does not do by itself: pages that are files of the repository, links, tables.

Every link in README.md and in the pages is one that works in a checkout. On the site it leads
to the page made of that file, or else to the file where the repository is published. Tables that
are made from the code (``tables.py``) are put where a page says so.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from tables import TABLES

ROOT = Path(__file__).parent.parent
PAGES = PurePosixPath("docs/pages")
TAKEN = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/LOG.md": "log.md",
    **{f"bench/log/{path.name}": f"log-{path.name}" for path in ROOT.glob("bench/log/*.md")},
}
# [text](path#anchor), where path is no address of the web
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
TABLE = re.compile(r"<!-- table: (\w+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files of the repository."""
    for path, name in TAKEN.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in the tables, and turn links to files of the repository into links of the site."""
    sources = {name: PurePosixPath(path) for path, name in TAKEN.items()}
    name = page.file.src_uri
    folder = sources.get(name, PAGES / name).parent

    def rewritten(link: re.Match) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (ROOT / folder / target).resolve()
        if not path.exists():
            raise PluginError(f"{name} links to {target}, which does not exist")
        inside = path.relative_to(ROOT).as_posix()
        if inside in TAKEN:
            return f"[{text}]({TAKEN[inside]}{anchor})"
        if path.is_relative_to(ROOT / PAGES):
            return f"[{text}]({path.relative_to(ROOT / PAGES).as_posix()}{anchor})"
        repository = (config.repo_url or "").rstrip("/")
        return f"[{text}]({repository}/blob/main/{inside}{anchor})" if repository else text

    return LINK.sub(rewritten, TABLE.sub(lambda table: TABLES[table[1]](), markdown))
