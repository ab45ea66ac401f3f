"""What imports TensorFlow, and the package of a file, is read from the text and the path of files."""

import pathlib

import pytest

from tests import import_graph
from tests.import_graph import ROOT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import json\n", False),
        ("import tensorflow as tf\n", True),
        ("from keras import layers\n", True),
        ("try:\n    import horovod.tensorflow as hvd\nexcept ImportError:\n    hvd = None\n", True),
        ("def test_a():\n    import tensorflow\n", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorflow\n", False),
        ("hvd = pytest.importorskip('horovod.tensorflow')\n", True),
        ("import tfdist\n", False),
        ("from tfdist.errors import InputError\n", False),
        ("from tfdist.step import step\n", True),
        ("from tfdist.strategies import mirrored\n", True),
        ("from tests import sessions\n", False),
        ("from tests.workers import cases\n", True),
    ],
)
def test_what_imports_tensorflow(tmp_path: pathlib.Path, text: str, expected: bool):
    file = tmp_path / "a_test.py"
    file.write_text(text)
    assert import_graph.imports_tensorflow(file) == expected


def test_what_a_conftest_imports_counts_for_its_folder():
    assert import_graph.imports_tensorflow(ROOT / "tests" / "optimizers" / "any_test.py")
    assert not import_graph.imports_tensorflow(ROOT / "tests" / "config" / "any_test.py")


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("tfdist/step/step.py", "step"),
        ("tfdist/data/array_files.py", "data"),
        ("tfdist/train.py", "commands"),
        ("strategies/mesh.py", "strategies"),
        ("tests/step/step_test.py", "step"),
        ("tests/strategies/mesh_test.py", "strategies"),
        ("tests/end_to_end/resume/exact_test.py", "commands"),
        ("tests/run_test.py", "commands"),
    ],
)
def test_the_package_of_a_file(path: str, package: str):
    assert import_graph.package_of(pathlib.PurePath(path)) == package
