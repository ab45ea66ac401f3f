import numpy as np
import pytest

from tfdist.data import EvaluationPipeline, load
from tfdist.errors import InputError

X = np.arange(20, dtype=np.float64).reshape(10, 2)
Y = np.arange(10) % 3


def everything(source):
    [(x, y)] = EvaluationPipeline(source, source.size).dataset([0], 1).as_numpy_iterator()
    return x, y


def saved(folder, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def test_x_and_y(tmp_path):
    found = load(saved(tmp_path, x=X, y=Y))
    assert (found.input_shape, found.classes, found.test) == ((2,), 3, None)
    x, y = everything(found.train)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_the_files_of_keras(tmp_path):
    images = np.full((10, 4, 4), 51, np.uint8)
    name = saved(tmp_path, x_train=images, y_train=Y[:, None], x_test=images[:4], y_test=Y[:4])
    found = load(name)
    assert found.input_shape == (4, 4, 1) and found.classes == 3
    assert found.test and (found.train.size, found.test.size) == (10, 4)
    x, y = everything(found.test)
    np.testing.assert_allclose(x, np.full((4, 4, 4, 1), 0.2))
    np.testing.assert_array_equal(y, Y[:4])
    with pytest.raises(InputError, match="without a test part"):
        load(f"{name}(validation_split=0.5)")


def test_a_validation_split(tmp_path):
    found = load(f"{saved(tmp_path, x=X, y=Y)}(validation_split=0.3)")
    assert found.test and (found.train.size, found.test.size) == (7, 3)
    both = np.concatenate([everything(found.train)[0], everything(found.test)[0]])
    np.testing.assert_array_equal(both[np.argsort(both[:, 0])], X)


@pytest.mark.parametrize(
    ("y", "classes", "names"),
    [
        (np.array(["b", "a"] * 5), 2, ("a", "b")),
        (X[:, 0] / 3, None, ()),
        (np.eye(10)[:, :4], None, ()),
    ],
)
def test_forms_of_labels(tmp_path, y, classes, names):
    found = load(saved(tmp_path, x=X, y=y))
    assert (found.classes, found.class_names) == (classes, names)
    if names:
        np.testing.assert_array_equal(everything(found.train)[1], [1, 0] * 5)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": X}, "must have arrays x and y.*Received: .*data.npz with a"),
        ({"x": X}, "with x but without y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "without y_test"),
        ({"x": X, "y": Y[:3]}, r"same first dim.*\[10, 2\] and y of \[3\]"),
        ({"x": X[:0], "y": Y[:0]}, "at least 1"),
        ({"x": np.array(["a"] * 10), "y": Y}, "x must be numbers"),
        ({"x": np.array([None] * 10), "y": Y}, "cannot be read"),
        ({"x": X, "y": Y - 1}, "Integer labels must be at least 0. Received: -1"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :1], "y_test": Y}, "shape of the training examples"),
        ({"x_train": X, "y_train": np.array(["a"] * 10), "x_test": X, "y_test": np.array(["b"] * 10)}, "'b'"),
    ],
)
def test_other_arrays_are_errors(tmp_path, arrays, says):
    with pytest.raises(InputError, match=says) as error:
        load(saved(tmp_path, **arrays))
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_archive_is_an_error(tmp_path):
    (tmp_path / "data.npz").write_text("text")
    with pytest.raises(InputError, match="data.npz, which cannot be read"):
        load(f"npz:{tmp_path}/data.npz")
    np.save(tmp_path / "one.npy", X)
    with pytest.raises(InputError, match="it is a single array"):
        load(f"npz:{tmp_path}/one.npy")
    with pytest.raises(InputError, match='there is no file dat.npz in .*Did you mean "data.npz"'):
        load(f"npz:{tmp_path}/dat.npz")
