import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import EvaluationPipeline
from tfdist.data.synthetic import synthetic
from tfdist.errors import InputError


def everything(source):
    [(x, y)] = EvaluationPipeline(source, source.size).dataset([0], 1).as_numpy_iterator()
    return x, y


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
