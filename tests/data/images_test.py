import gzip
import struct

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import EvaluationPipeline, images
from tfdist.errors import InputError

NAMES = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]


def everything(source):
    [(x, y)] = EvaluationPipeline(source, source.size).dataset([0], 1).as_numpy_iterator()
    return x, y


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


def test_fashion_mnist_is_found_where_keras_keeps_data_sets(fashion, tmp_path, monkeypatch):
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
    "content", [b"", b"not gzip", gzip.compress(b"", mtime=0), gzip.compress(b"\0\0\x08\x01\0\0\0\x05ab", mtime=0)]
)
def test_a_broken_idx_file_is_named(fashion, content):
    folder, _ = fashion
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        images.fashion_mnist(str(folder))
