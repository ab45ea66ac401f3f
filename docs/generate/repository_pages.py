"""Pages of the site for files outside of docs/: README, BUILD and others, and the code to which pages link."""

import os
import pathlib
import re
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = {
    "BUILD.md": "project/build.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/README.md": "examples/index.md",
    "examples/quickstart.ipynb": "notebook.md",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml", ".diff": "diff", ".sh": "bash"}
_MARKER = re.compile(r"( *)([-*+]|\d+\.)( +)\S")


def targets(text: str, place: str) -> Iterator[str]:
    """Yields the files of the repository to which a page links, as paths from its root.

    Args:
      text: the page's Markdown.
      place: the page's path from the root of the repository.
    """
    for link in _LINK.findall(text):
        yield os.path.normpath(os.path.join(os.path.dirname(place), link))


def site_path(path: str) -> str:
    """Returns where the site has a file of the repository."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    return path.removeprefix("docs/") if _is_page(path) else f"examples/files/{path.replace('/', '-')}.md"


def rewritten(text: str, place: str, page: str) -> str:
    """Returns a page's Markdown with links to where the site has the files.

    Args:
      text: the page's Markdown.
      place: the page's path from the root of the repository.
      page: its path in the site.
    """

    def link(found: re.Match[str]) -> str:
        (path,) = targets(f"]({found[0]})", place)
        return os.path.relpath(site_path(path), os.path.dirname(page)) if (ROOT / path).exists() else found[0]

    return _LINK.sub(link, text)


def code_pages(places: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields path in the site and Markdown of a page for each file of code that is linked to.

    Args:
      places: Markdown and path from the root of the repository, of every page.
    """
    linked = {path for text, place in places for path in targets(text, place) if (ROOT / path).exists()}
    for path in sorted(linked):
        if path not in DOCUMENTS and not _is_page(path):
            yield site_path(path), f"# {path}\n\n{''.join(_fenced(ROOT / path))}"


def for_python_markdown(text: str) -> str:
    """Returns Markdown without comments, whose lists are indented by four spaces, as Python-Markdown needs, unlike others."""
    lines: list[str] = []
    items: list[tuple[int, int]] = []  # indentation of each open item's marker and of its contents
    fence = ""
    has_blocks = False  # whether the last item has several, after which an item needs an empty line before it
    for line in re.sub(r"^ *<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        indent = len(line) - len(line.lstrip())
        marker = None if fence else _MARKER.match(line)
        if line.strip() and not fence:
            while items and indent < items[-1][1] and (marker or not (lines and lines[-1].strip())):
                items.pop()
        known = items[-1][1] if items else 0
        kept = max(indent - known, 0)
        if line.strip() and (fence or indent >= known or marker):
            shown = " " * (4 * len(items) + kept) + line.lstrip()
        else:
            shown = line
        if marker:
            if lines and lines[-1].strip() and (has_blocks or (not items and not _was_item(lines[-1]))):
                lines.append("")
            has_blocks = False
            items.append((indent, indent + len(marker[2]) + len(marker[3])))
        has_blocks |= bool(items and not marker and line.strip() and not lines[-1].strip())
        lines.append(shown)
        if found := re.match(r"\s*(```+)", line):
            fence = "" if fence else found[1]
    return "\n".join(lines) + "\n"


def _was_item(line: str) -> bool:
    return bool(_MARKER.match(line)) or line.startswith("    ")


def _is_page(path: str) -> bool:
    return path.startswith("docs/") and path.endswith((".md", ".png", ".svg", ".ipynb"))


def _fenced(path: pathlib.Path) -> Iterator[str]:
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
    for file in files:
        title = f' title="{file.name}"' if len(files) > 1 else ""
        yield f"````{_LANGUAGES.get(file.suffix, 'text')}{title}\n{file.read_text(encoding='utf-8')}````\n\n"
