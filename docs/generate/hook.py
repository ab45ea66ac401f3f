"""The hook of mkdocs.yml: adds generated pages, and makes the links and lists of every page those of the site."""

import pathlib
from typing import Any

import api_pages
import flag_pages
import notebook_page
import repository_pages
from mkdocs.structure.files import File, Files

_SHIM = "https://unpkg.com/iframe-worker/shim"
_SECTIONS = {"Flags": flag_pages.pages, "API": api_pages.pages}  # of the navigation
_places: dict[str, str] = {}  # a page's path in the site, and that of its source from the root of the repository


def on_config(config: Any) -> Any:
    """Replaces the entries of the flags and of the API in the navigation by their pages."""
    for entry in config.nav:
        for title in _SECTIONS.keys() & entry.keys():
            entry[title] = [path for path, _ in _SECTIONS[title]()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    root = repository_pages.ROOT
    _places.clear()
    _places.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    for place, page in repository_pages.DOCUMENTS.items():
        if page not in _places:
            _places[page] = place
            _add(files, config, page, _markdown(root / place))
    sources = [(_markdown(root / place), place) for place in _places.values()]
    generated = {
        **dict(flag_pages.pages()),
        **dict(api_pages.pages()),
        **dict(repository_pages.code_pages(sources)),
    }
    for page, text in generated.items():
        _add(files, config, page, text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapts links and lists."""
    place = _places.get(page.file.src_uri)
    if place is None:
        return markdown
    markdown = repository_pages.rewritten(markdown, place, page.file.src_uri)
    return repository_pages.for_python_markdown(markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replaces a script of the theme that would be loaded from elsewhere."""
    return output.replace(_SHIM, f"{'../' * page.file.dest_uri.count('/')}javascripts/file_worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Same as `on_post_page`, for the page of a missing one."""
    return output_content.replace(_SHIM, "javascripts/file_worker.js")


def _markdown(path: pathlib.Path) -> str:
    return notebook_page.text(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def _add(files: Files, config: Any, page: str, text: str) -> None:
    files.append(File.generated(config, pathlib.PurePosixPath(page).as_posix(), content=text))
