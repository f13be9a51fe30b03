"""Adds the files of the repository that pages link to, such as ``deploy/local.yaml``, to the site, below
``repository/``. Fails the build if a page would load something from another host."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
COPIES = "repository"
_DOCS = "docs/"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*\bhref=\"?https?:")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds copies of the files outside of docs/ that pages link to, directly or from such a file."""
    to_read = [_DOCS + file.src_uri for file in files if file.is_documentation_page()]
    found: set[str] = set()
    while to_read:
        for target in _outside(to_read.pop()):
            if target not in found:
                found.add(target)
                files.append(_copy(config, target))
                if target.endswith(".md"):
                    to_read.append(target)
                elif (ROOT / target).is_dir():
                    to_read += [f"{target}/"]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files outside of docs/, and links of such files, to what is in the site."""
    own = page.file.src_uri
    origin = own.removeprefix(f"{COPIES}/") if own.startswith(f"{COPIES}/") else _DOCS + own
    folder = posixpath.dirname(origin)

    def linked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if not (ROOT / target).exists() or (origin.startswith(_DOCS) and target.startswith(_DOCS)):
            return match[1]
        return posixpath.relpath(_place(target), posixpath.dirname(own))

    return _LINK.sub(linked, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {loaded[0]}")
    return output


def _outside(source: str) -> Iterator[str]:
    """The existing files and folders outside of docs/ that a file links to, or that a folder has."""
    if source.endswith("/"):
        yield from (source + file.name for file in sorted((ROOT / source).iterdir()) if file.is_file())
        return
    for link in _LINK.findall((ROOT / source).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if not f"{target}/".startswith((_DOCS, "..")) and (ROOT / target).exists():
            yield target


def _place(target: str) -> str:
    """Where a file of the repository is in the site, as a source."""
    if target.startswith(_DOCS):
        return target.removeprefix(_DOCS)
    return f"{COPIES}/{target}/index.md" if (ROOT / target).is_dir() else f"{COPIES}/{target}"


def _copy(config: MkDocsConfig, target: str) -> File:
    if (ROOT / target).is_dir():
        names = sorted(file.name for file in (ROOT / target).iterdir() if file.is_file())
        listing = "\n".join(f"* [{name}]({name})" for name in names)
        return File.generated(config, _place(target), content=f"# {target}\n\n{listing}\n")
    return File.generated(config, _place(target), abs_src_path=str(ROOT / target))
