import sys
import textwrap

import numpy as np
import pytest

from tfdist.config.data_set_names import AFTER_COLON
from tfdist.data import DataSet, EvaluationPipeline, Pipeline, load
from tfdist.data.catalog import CATALOG
from tfdist.errors import InputError

MODULE = """
    import numpy as np
    import tensorflow as tf

    X, Y = np.arange(8.0), np.arange(8) % 2

    def arrays():
        return X, Y

    def both(data_dir, size=3):
        return (X, Y), (X[:size], Y[:size]), data_dir

    def pair(size=3):
        return (X, Y), (X[:size], Y[:size])

    def stream(data_dir="unset"):
        assert data_dir == "here", data_dir
        return tf.data.Dataset.from_tensor_slices((X, Y))

    def nothing():
        return None
"""


def test_flags_know_all_names():
    assert sorted(AFTER_COLON) == sorted(CATALOG)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_data_for_test.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_data_for_test.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_data_for_test"
    for name in ("my_data_for_test", "broken_data_for_test"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "size", "input_shape", "classes"),
    [
        ("digits", 1437, (8, 8, 1), 10),
        ("mnist5k", 4000, (28, 28, 1), 10),
        ("text(length=32, max_bytes=100000)", 95_000 // 32, (32,), 256),
        ("synthetic", 1024, (28, 28, 1), 10),
        ("synthetic:6x4x3", 1024, (6, 4, 3), 10),
        ("synthetic:9(size=20, classes=2)", 20, (9,), 2),
        ("synthetic(shape=(5, 5), size=30)", 30, (5, 5), 10),
    ],
)
def test_each_name_loads_and_has_batches(name, size, input_shape, classes):
    found = load(name)
    assert isinstance(found, DataSet)
    assert (found.train.size, found.input_shape, found.classes) == (size, input_shape, classes)
    x, y = next(Pipeline(found.train, 6, seed=0).dataset([0], 1).as_numpy_iterator())
    assert x.shape == (6, *input_shape) and y.min() >= 0 and y.max() < classes
    assert found.test
    x, _ = next(EvaluationPipeline(found.test, 6).dataset([0], 1).as_numpy_iterator())
    assert x.shape == (6, *input_shape)


@pytest.mark.parametrize(("call", "test_size"), [("arrays", None), ("pair", 3), ("pair(size=5)", 5), ("stream", None)])
def test_a_users_own_function_is_called(module, call, test_size):
    found = load(f"{module}:{call}", data_dir="here")
    assert found.name == f"{module}:{call}"
    assert found.train.size == 8
    assert (found.test.size if found.test else None) == test_size
    x, y = next(Pipeline(found.train, 4, seed=0).dataset([0], 1).as_numpy_iterator())
    np.testing.assert_array_equal(x % 2, y)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digit", r'dataset=digit is not known. Did you mean "digits"\? Known: csv, digits, fashion_mnist, .*tfds'),
        ("digits(size=3)", 'digits has no parameter "size"'),
        ("text(lenght=3)", 'Did you mean "length"'),
        ("text(length=", "column"),
        ("synthetic:4xfour", "synthetic:224x224x3"),
        ("synthetic:", "synthetic:224x224x3"),
        ("tfds", "name"),
        ("tfds:", "NAME"),
        ("my_data_for_test:nothing", "Received: NoneType"),
        ("my_data_for_test:both", "same first dim"),
        ("my_data_for_test:missing", "there is no missing in it"),
        ("broken_data_for_test:f", "No module named 'a_module_that_is_missing'"),
        ("no_such_package_at_all.m:f", "No module named 'no_such_package_at_all'"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_says_why(module, name, says):
    with pytest.raises(InputError, match=says) as error:
        load(name)
    assert "\n" not in str(error.value)
