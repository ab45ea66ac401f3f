"""The notebook runs from its first cell to its last, and prints what is stored in it, which the site shows."""

import pathlib

import nbformat
import pytest

from tests.documents import notebooks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.filterwarnings(
    "ignore:Kernel is running over TCP", "ignore::DeprecationWarning:(zmq|jupyter_client|traitlets)"
)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_outputs_of_a_notebook_are_real(path: pathlib.Path, tmp_path: pathlib.Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not notebooks.problems(notebook, notebooks.run(notebook, tmp_path))
