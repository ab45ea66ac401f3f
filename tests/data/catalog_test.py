"""Datasets by name, those that come with Python packages or are made, and packages that are missing."""

import gzip
import importlib
import struct
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests.data.reading import everything
from tfdist.config.dataset_files import COLON_ARGUMENTS
from tfdist.data import DatasetSplits, EvaluationPipeline, Pipeline, TextSource, catalog, images, load
from tfdist.data import catalog as text_module
from tfdist.data.catalog import CATALOG, synthetic
from tfdist.data.images import import_extra
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
    assert sorted(COLON_ARGUMENTS) == sorted(CATALOG)


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
        ("synthetic", 1024, (28, 28, 1), 10),
        ("synthetic:6x4x3", 1024, (6, 4, 3), 10),
        ("synthetic:9(size=20, classes=2)", 20, (9,), 2),
        ("synthetic(shape=(5, 5), size=30)", 30, (5, 5), 10),
    ],
)
def test_each_name_loads_and_has_batches(name, size, input_shape, classes):
    found = load(name)
    assert isinstance(found, DatasetSplits)
    assert (found.train.size, found.input_shape, found.classes) == (size, input_shape, classes)
    x, y = next(Pipeline(found.train, 6, seed=0).dataset([0], 1).as_numpy_iterator())
    assert x.shape == (6, *input_shape) and y.min() >= 0 and y.max() < classes
    assert found.test
    (x, _), *_ = next(EvaluationPipeline(found.test, 6).dataset([0], 1).as_numpy_iterator())
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
        ("digits(size=3)", 'digits has no parameter "size"'),
        ("text(lenght=3)", 'Did you mean "length"'),
        ("text(length=", "column"),
        ("synthetic:4xfour", "synthetic:224x224x3"),
        ("synthetic:", "synthetic:224x224x3"),
        ("tfds", "name"),
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


NAMES = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]


def write_idx(path, array):
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture
def fashion(tmp_path):
    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 256, (n, 28, 28), np.uint8) if i == 0 else np.arange(n, dtype=np.uint8) % 10
              for n in (20, 10) for i in range(2)]  # fmt: skip
    for name, array in zip(NAMES, arrays, strict=True):
        write_idx(tmp_path / f"{name}-ubyte.gz", array)
    return tmp_path, arrays


def test_digits():
    found = images.digits()
    assert (found.name, found.input_shape, found.classes) == ("digits", (8, 8, 1), 10)
    assert found.test and (found.train.size, found.test.size) == (1437, 360)
    x, y = everything(found.test)
    assert x.shape == (360, 8, 8, 1) and x.dtype == np.float32 and (x.min(), x.max()) == (0, 1)
    assert y.dtype == np.int32
    assert set(np.bincount(y)) <= {34, 35, 36, 37}
    assert len(np.unique(np.concatenate([everything(found.train)[0], x]), axis=0)) == 1797


def test_mnist5k():
    found = images.mnist5k()
    assert found.test
    assert (found.input_shape, found.classes, found.train.size, found.test.size) == ((28, 28, 1), 10, 4000, 1000)
    x, y = everything(found.train)
    assert x.dtype == np.float32 and (x.min(), x.max()) == (0, 1)
    np.testing.assert_array_equal(np.bincount(y), [400] * 10)
    assert (np.diff(y) < 0).any()  # the file is sorted by class, but the subset must not be


def test_fashion_mnist_is_read_from_idx_files(fashion):
    folder, (train_x, train_y, test_x, test_y) = fashion
    found = images.fashion_mnist(str(folder))
    assert (found.input_shape, found.classes) == ((28, 28, 1), 10)
    for source, images_, labels in [(found.train, train_x, train_y), (found.test, test_x, test_y)]:
        x, y = everything(source)
        np.testing.assert_allclose(x[..., 0], images_ / np.float32(255))
        np.testing.assert_array_equal(y, labels)
    assert found.train.element_spec == (tf.TensorSpec([28, 28, 1], tf.float32), tf.TensorSpec([], tf.int32))


def test_fashion_mnist_is_found_where_keras_keeps_datasets(fashion, tmp_path, monkeypatch):
    folder, _ = fashion
    (tmp_path / "home" / "datasets").mkdir(parents=True)
    (tmp_path / "home" / "datasets" / "fashion-mnist").symlink_to(folder)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    assert images.fashion_mnist().name == "fashion_mnist"


def test_fashion_mnist_that_is_nowhere_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(images.os.path, "exists", lambda path: False)
    with pytest.raises(InputError) as error:
        images.fashion_mnist(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "Debian package dataset-fashion-mnist" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"", mtime=0), gzip.compress(b"\0\0\x08\x01\0\0\0\x05ab", mtime=0)]
    + [gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9],
)
def test_a_broken_idx_file_is_named(fashion, content):
    folder, _ = fashion
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        images.fashion_mnist(str(folder))


def test_shape_size_and_classes_are_as_asked():
    found = synthetic("6x5x2", classes=4, size=50, test_size=20)
    assert (found.name, found.input_shape, found.classes) == ("synthetic:6x5x2", (6, 5, 2), 4)
    assert found.test and (found.train.size, found.test.size) == (50, 20)
    assert found.train.element_spec == (tf.TensorSpec([6, 5, 2], tf.float32), tf.TensorSpec([], tf.int32))
    x, y = everything(found.train)
    assert x.min() >= 0 and x.max() <= 1 and set(y) == set(range(4))
    assert synthetic((3,), test_size=0).test is None


def test_the_nearest_mean_of_the_training_classes_tells_the_test_classes():
    found = synthetic((10, 10), classes=5, size=200)
    (x, y), (test_x, test_y) = everything(found.train), everything(found.test)
    means = np.stack([x[y == label].mean(0) for label in range(5)])
    guess = ((test_x[:, None] - means) ** 2).sum((2, 3)).argmin(1)
    assert (guess == test_y).mean() > 0.97


def test_a_seed_gives_the_same_data():
    first, again, other = (everything(synthetic((4,), seed=seed).train)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("shape", ["", "4xx3", "axb", "4x0", "-4", (), (0, 3), 7, (None,)])
def test_wrong_shapes_are_an_error(shape):
    with pytest.raises(InputError, match="as in synthetic:224x224x3"):
        synthetic(shape)


@pytest.mark.parametrize("wrong", [{"classes": 0}, {"size": 0}, {"test_size": -1}])
def test_wrong_numbers_are_an_error(wrong):
    with pytest.raises(InputError, match="at least 1"):
        synthetic((4,), **wrong)


def test_windows_follow_each_other_and_y_is_x_shifted_by_one():
    source = TextSource(np.arange(11, dtype=np.uint8), 3)
    assert source.size == 3
    assert source.element_spec == (tf.TensorSpec([3], tf.int32),) * 2
    x, y = source.fetch(tf.range(3, dtype=tf.int64))
    np.testing.assert_array_equal(x, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize(("length_of_text", "windows"), [(4, 1), (6, 1), (7, 2)])
def test_a_window_needs_one_byte_more_for_y(length_of_text, windows):
    assert TextSource(np.zeros(length_of_text, np.uint8), 3).size == windows


@pytest.mark.parametrize(("length_of_text", "length"), [(3, 3), (0, 1), (10, 0), (10, -1)])
def test_a_text_must_hold_a_window(length_of_text, length):
    with pytest.raises(InputError, match="longer than a window"):
        TextSource(np.zeros(length_of_text, np.uint8), length)


def test_the_standard_library_is_source_text():
    found = text_module.text(length=16, max_bytes=400_000)
    assert (found.input_shape, found.classes) == ((16,), 256)
    assert isinstance(found.train, TextSource) and isinstance(found.test, TextSource)
    assert (found.train.size, found.test.size) == ((380_000 - 1) // 16, (20_000 - 1) // 16)
    x, _ = found.train.fetch(tf.range(found.train.size, dtype=tf.int64))
    assert b"import" in bytes(x.numpy().astype(np.uint8).ravel())


def test_files_come_in_sorted_order_without_installed_packages(tmp_path, monkeypatch):
    for name in ["b.py", "a.py", "c.txt", "z/y.py", "site-packages/x.py", "test/t.py", "k/__pycache__/q.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert text_module._standard_library(1000) == b"a.pyb.pyz/y.py"
    assert text_module._standard_library(6) == b"a.pyb."
    assert text_module._standard_library(-1) == b""


@pytest.mark.parametrize(
    ("load", "package", "name"),
    [
        (images.digits, "sklearn", "examples"),
        (lambda: catalog.tfds_splits("mnist", "/nowhere"), None, "tfds"),
        (lambda: import_extra("not_there.part", "A test", "tfds"), "not_there", "tfds"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(load, package, name, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError) as error:
        load()
    if package:
        assert f"needs the Python package {package}." in str(error.value)
        assert str(error.value).endswith(f"Run `pip install 'tfdist[{name}]'`.")
