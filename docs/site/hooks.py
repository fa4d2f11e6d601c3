"""MkDocs' hooks: they do what `site_map` and `site_reference` decide, and see that no page loads anything foreign."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import site_map
import site_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.superfences import fence_code_format

#: What a browser would fetch by itself from another place.
_FOREIGN = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:)?//[^>]*>""")
_MERMAID = site_map.ROOT / ".venv-docs" / "mermaid.min.js"
_MERMAID_ON_SITE = "assets/javascripts/mermaid.min.js"
_HARMLESS = re.compile(r"""\brel=["']?(?:canonical|prev|next|edit)\b""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as on a code host, so that one link is right on both; diagrams, where the library is here."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = site_map.slug
    if _MERMAID.is_file():
        # With the library on the page the theme does not load it from elsewhere.
        config.extra_javascript.append(_MERMAID_ON_SITE)
        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie below docs, and what is made of the code."""
    pages = {here: (site_map.ROOT / there).read_text() for here, there in site_map.PAGES.items()}
    pages |= {here: site_map.folder_page(there) for here, there in site_map.FOLDERS.items()}
    pages |= {here: make() for here, make in site_reference.GENERATED.items()}
    for here, text in pages.items():
        files.append(File.generated(config, here, content=text))
    linked = pages | {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    for path in site_map.brought_in(linked):
        files.append(File.generated(config, site_map.on_site(path), abs_src_path=str(site_map.ROOT / path)))
    if _MERMAID.is_file():
        files.append(File.generated(config, _MERMAID_ON_SITE, abs_src_path=str(_MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to where things are on the site."""
    return site_map.turned(page.file.src_uri, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """No font, script, style or picture comes from another server: readers tell nobody what they read."""
    for path in Path(config.site_dir).rglob("*.html"):
        foreign = [m[0] for m in _FOREIGN.finditer(path.read_text()) if not _HARMLESS.search(m[0])]
        if foreign:
            raise PluginError(f"{path.name} would load {foreign[0]}")
