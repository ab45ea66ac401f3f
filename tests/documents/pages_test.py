"""Every command, output and program that the documentation shows is real: they are run, page by page, and so are notebooks.

`python -m tests.documents --update PAGE` writes new outputs into a page.
"""

import pathlib

import nbformat
import pytest

from tests.documents import blocks, notebooks, running

ROOT = running.ROOT
PAGES = ["README.md", "BUILD.md", "examples/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
BLOCKS = {page: found for page in PAGES if (found := blocks.read(ROOT / page))}
QUICK = ("docs/guides/trainer.md", "docs/reference/json.md")  # the others are run by `make conformance`
NOT_RUN = {
    "BUILD.md": 6,
    "README.md": 1,
    "docs/guides/checkpoints.md": 2,
    "docs/guides/finders.md": 3,
    "docs/guides/from_pytorch_ddp.md": 1,
    "docs/guides/from_tf_distribute.md": 1,
    "docs/guides/keras_fit.md": 1,
    "docs/guides/kubernetes.md": 1,
    "docs/guides/meshes.md": 4,
    "docs/guides/mpi.md": 1,
    "docs/guides/parameter_servers.md": 2,
    "docs/guides/pipelines.md": 2,
    "docs/guides/restarts.md": 1,
    "docs/guides/runbook.md": 3,
    "docs/guides/runs.md": 2,
    "docs/guides/several_gpus.md": 2,
    "docs/guides/slurm.md": 2,
    "docs/reference/compatibility.md": 1,
    "docs/tutorial.md": 1,
    "examples/README.md": 1,
}


def test_few_blocks_are_not_run():
    """Each has a reason in the page: a cluster, a GPU, an installation, or a part of a program."""
    counts = {page: sum(bool(block.not_run) for block in found) for page, found in BLOCKS.items()}
    assert {page: count for page, count in counts.items() if count} == NOT_RUN


@pytest.mark.processes
@pytest.mark.separable
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in QUICK else pytest.mark.full) for page in BLOCKS]
)
def test_what_a_page_shows_is_what_happens(page: str, tmp_path: pathlib.Path):
    problems = [result.problem for result in running.run(BLOCKS[page], tmp_path) if result.problem]
    assert not problems, "\n\n".join(problems)


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore:Kernel is running over TCP", "ignore::DeprecationWarning:(zmq|jupyter_client|traitlets)"
)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_outputs_that_a_notebook_stores_and_the_site_shows_are_real(path: pathlib.Path, tmp_path: pathlib.Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not notebooks.problems(notebook, notebooks.run(notebook, tmp_path))
