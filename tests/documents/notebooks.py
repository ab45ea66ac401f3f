"""Runs notebooks, as Jupyter would, and stores what their cells print.

python -m tests.documents.notebooks [--update] examples/quickstart.ipynb
"""

import pathlib
import sys
import tempfile

import nbclient
import nbformat

from tests.documents import comparison

DEADLINE_SECONDS = 240  # for a cell


def run(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> nbformat.NotebookNode:
    """Returns the notebook with new outputs, which may write files in the folder; raises if a cell does."""
    done = nbformat.from_dict(notebook)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(done, timeout=DEADLINE_SECONDS, resources=resources, record_timing=False).execute()
    return done


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Returns for each cell of code the lines that it prints, and the kinds of pictures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[line for output in cell.outputs for line in _lines(output)] for cell in cells]


def problems(expected: nbformat.NotebookNode, actual: nbformat.NotebookNode) -> list[str]:
    """Returns what differs between the outputs of two runs of a notebook."""
    pairs = zip(outputs(expected), outputs(actual), strict=True)
    return [
        f"cell {number}: {shown} is stored, but the output is {found}"
        for number, (shown, found) in enumerate(pairs)
        if not comparison.same(shown, found)
    ]


def _lines(output: nbformat.NotebookNode) -> list[str]:
    if output.output_type == "stream":
        return list(output.text.splitlines())
    pictures = [kind for kind in output.data if kind.startswith("image/")]
    return pictures or list(output.data["text/plain"].splitlines())


def main(arguments: list[str]) -> int:
    """Runs notebooks; returns 1 if one differs and is not updated."""
    update = "--update" in arguments
    code = 0
    for path in map(pathlib.Path, (argument for argument in arguments if argument != "--update")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            done = run(notebook, pathlib.Path(folder))
        for problem in problems(notebook, done):
            print(problem)
            code = 0 if update else 1
        if update:
            done.metadata.pop("language_info", None)  # the version of Python
            nbformat.write(done, path)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
