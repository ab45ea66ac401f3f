"""Every command, output and program that the documentation shows is real: they are run, page by page, and so are notebooks.

`jupyter execute --inplace NOTEBOOK` stores new outputs in a notebook.
"""

import pathlib

import nbclient
import nbformat
import pytest

from tests.documents import blocks, comparison, running

ROOT = running.ROOT
PAGES = ["README.md", "BUILD.md", "examples/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
BLOCKS = {page: found for page in PAGES if (found := blocks.read(ROOT / page))}
QUICK = ("docs/guides/trainer.md", "docs/reference/json.md")  # the others are run by `make conformance`


def test_few_blocks_are_not_run():
    """Each has a reason in the page: a cluster, a GPU, an installation, or a part of a program."""
    assert sum(bool(block.not_run) for found in BLOCKS.values() for block in found) <= 38


@pytest.mark.processes
@pytest.mark.separable
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in QUICK else pytest.mark.full) for page in BLOCKS]
)
def test_what_a_page_shows_is_what_happens(page: str, tmp_path: pathlib.Path):
    problems = [result.problem for result in running.run(BLOCKS[page], tmp_path) if result.problem]
    assert not problems, "\n\n".join(problems)


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Returns for each cell of code the lines that it prints, and the kinds of pictures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[line for output in cell.outputs for line in lines(output)] for cell in cells]


def lines(output: nbformat.NotebookNode) -> list[str]:
    if output.output_type == "stream":
        return list(output.text.splitlines())
    pictures = [kind for kind in output.data if kind.startswith("image/")]
    return pictures or list(output.data["text/plain"].splitlines())


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore:Kernel is running over TCP", "ignore::DeprecationWarning:(zmq|jupyter_client|traitlets)"
)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_outputs_that_a_notebook_stores_and_the_site_shows_are_real(path: pathlib.Path, tmp_path: pathlib.Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    shown, resources = outputs(notebook), {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources, record_timing=False).execute()
    for expected, actual in zip(shown, outputs(notebook), strict=True):
        assert comparison.same(expected, actual), (expected, actual)
