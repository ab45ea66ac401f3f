"""How many batches a call of Keras takes, and when they are compared over processes; wrong_use_test.py has real processes."""

import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.coordination import LocalGroup
from tfdist.keras_fit.batch_readers import BatchReader
from tfdist.keras_fit.call_agreement import INFINITE as INFINITE_PASS
from tfdist.keras_fit.call_agreement import batches_per_pass, steps_per_call

X = np.zeros((33, 2))
ENDLESS = tf.data.Dataset.range(3).repeat().batch(2)


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"x": X}, [2]),
        ({"x": [X, X], "batch_size": 10}, [4]),
        ({"x": X, "batch_size": 8, "validation_split": 0.25}, [3, 2]),
        ({"x": X, "batch_size": 8, "validation_data": (X, X), "validation_batch_size": 30}, [5, 2]),
        ({"x": Pieces(), "validation_data": (X, X), "validation_steps": 1}, [9, 1]),
        ({"x": tf.data.Dataset.range(7).batch(3)}, [3]),
        ({"x": ENDLESS}, [INFINITE_PASS]),
        ({"x": tf.data.Dataset.range(7).filter(lambda i: i > 2).batch(3)}, [None]),
        ({"x": X, "steps": 10}, [9]),
        ({"x": X, "batch_size": 10, "validation_data": (X, X), "validation_steps": 5}, [4, 4]),
        ({"x": X, "steps_per_epoch": 3, "validation_data": (X, X), "validation_steps": 5}, [3, 5]),
        ({"x": ENDLESS, "steps_per_epoch": 5, "validation_data": ENDLESS}, [5, INFINITE_PASS]),
        ({"x": iter([X])}, [None]),
    ],
)
def test_batches_in_a_pass(given, expected):
    assert batches_per_pass(given) == expected


@pytest.mark.parametrize("more", [{"batch_size": 8}, {"steps_per_epoch": 7}, {"steps_per_epoch": 40}, {}])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_keras_counts_the_same(more):
    """Compared with the number that `fit` actually takes."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ends = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    given = {"x": X, "y": X[:, :1], "validation_split": 0.25, **more}
    model.fit(**given, callbacks=[count], verbose=0)
    assert len(ends) == batches_per_pass(given)[0]


@pytest.mark.parametrize(
    ("batches", "cardinality", "expected"),
    [(20, 20, 10), (15, 15, 5), (13, 13, 1), (6, 0, 6), (6, 4, 2), (6, None, 1), (None, None, 1)],
)
def test_a_pass_is_a_whole_number_of_calls(batches, cardinality, expected):
    """So is all available data: if it ends in the middle of a pass, logs are those of the last step."""
    assert steps_per_call(batches, cardinality, 10) == expected


class TwoProcesses(LocalGroup):
    """A strategy whose other process has read the same batches."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = self.peers = self
        self.size = 2
        self.names: list[str] = []

    def gather(self, name: str, value: str, deadline: float = 60.0) -> list[str]:
        self.names.append(name)
        return [value, value]


def compared(strategy: TwoProcesses, calls: list[int], length: int) -> list[int]:
    """Returns after how many batches there was a comparison, given the number of batches that each call takes."""
    data: Any = types.SimpleNamespace(strategy=strategy, deadline=60, batches_per_pass=length, spec=None)
    batches = BatchReader(data, iter(()), dict.fromkeys(range(length), 7), "fit 1/1")
    taken, found = 0, []
    for count in calls:
        taken += count
        before = len(strategy.names)
        batches.advance(count)
        found += [taken] * (len(strategy.names) - before)
    assert batches._checksums == {}
    return found


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([1] * 10, [1, 2, 4, 8, 10]),
        ([1], [1]),
        ([1] * 300, [1, 2, 4, 8, 16, 32, 64, 128, 228, 300]),
        ([10] * 30, [10, 20, 40, 80, 160, 260, 300]),  # once for each call at most
        ([300], [300]),
    ],
    ids=["one by one", "a single batch", "many", "several per call", "all in one call"],
)
def test_the_end_of_a_pass_is_compared(calls: list[int], expected: list[int]) -> None:
    strategy = TwoProcesses()
    assert compared(strategy, calls, sum(calls)) == expected
    assert len(set(strategy.names)) == len(expected)
