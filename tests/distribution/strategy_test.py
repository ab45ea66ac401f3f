"""Loading a strategy, and what all strategies have in common."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.models import Damped
from tfdist.collectives import OneReplica
from tfdist.distribution.factory import strategy_class
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError


class Own(Strategy):
    """A third-party strategy with one replica."""

    name = "own"
    replicas = 1
    local_replicas = range(1)

    def __init__(self, *, cluster, join, speed: int = 1):
        self.cluster, self.group, self.speed = cluster, join(cluster), speed
        self.collectives = OneReplica()


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    (tmp_path / "third_party_strategy.py").write_text("STRATEGY = None\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.import_module("third_party_strategy"), "Own", Own, raising=False)
    return "third_party_strategy"


def test_a_third_party_s_strategy_trains(third_party):
    strategy = tfdist.load_strategy(f"{third_party}:Own", environment={}, speed=3)
    assert isinstance(strategy, Own)
    assert (strategy.name, strategy.speed, strategy.is_chief) == ("own", 3, True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer=Damped(), loss="mse")
    trainer.fit((np.ones((4, 3), "float32"), np.ones((4, 1), "float32")), batch_size=2, steps=2)
    assert trainer.step == 2


def test_a_constructor_that_asks_for_the_start_timeout_gets_it(third_party, monkeypatch):
    class Patient(Own):
        def __init__(self, *, cluster, join, start_timeout_seconds):
            super().__init__(cluster=cluster, join=join)
            self.patience = start_timeout_seconds

    monkeypatch.setattr(importlib.import_module(third_party), "Patient", Patient, raising=False)
    name = f"{third_party}:Patient"
    assert tfdist.load_strategy(name, environment={}, start_timeout_seconds=7).patience == 7


def test_what_is_no_strategy_is_refused(third_party):
    with pytest.raises(InputError, match="must name a subclass of tfdist.Strategy. Received: 3"):
        strategy_class(f"{third_party}:NUMBER")


def test_the_scope_makes_it_current(single, mirrored2):
    with pytest.raises(InputError, match="scope must be open"):
        tfdist.current_strategy()
    with single.scope() as outer:
        assert tfdist.current_strategy() is outer is single
        with pytest.raises(KeyError), mirrored2.scope():
            assert tfdist.current_strategy() is mirrored2
            raise KeyError
        assert tfdist.current_strategy() is single
    with pytest.raises(InputError):
        tfdist.current_strategy()


@pytest.mark.parametrize("strategy", ["single", "mirrored2", "mirrored4"])
class TestEngines:
    @pytest.fixture(autouse=True)
    def setup(self, strategy, request):
        self.strategy = request.getfixturevalue(strategy)

    def test_elements_go_round_the_replicas(self, strategy):
        asked = []

        def make(replicas, size):
            asked.append((tuple(replicas), size))
            return tf.data.Dataset.range(8)

        iterator = self.strategy.distribute(make)
        n = self.strategy.replicas
        for start in range(0, 8, n):
            values = self.strategy.local(self.strategy.run(tf.identity, next(iterator)))
            assert [int(value) for value in values] == list(range(start, start + n))
        assert asked == [(tuple(range(n)), n)]

    def test_gradients_and_what_the_loss_returns_beside(self, strategy):
        with self.strategy.scope():
            a, b = keras.Variable(3.0), keras.Variable(1.0)

        def replica_function():
            gradients, loss, rest = self.strategy.gradients(lambda x: (x * a**2, {"x": x}), [a, b], tf.constant(2.0))
            assert gradients[1] is None
            return gradients[0], loss, rest["x"]

        gradient, loss, rest = self.strategy.run(replica_function)
        assert [float(x) for x in self.strategy.local(gradient)] == [12.0] * self.strategy.replicas
        assert [float(x) for x in self.strategy.local(loss)] == [18.0] * self.strategy.replicas
        assert [float(x) for x in self.strategy.local(rest)] == [2.0] * self.strategy.replicas

    def test_state_is_zero_and_each_replica_keeps_its_own(self, strategy):
        own, same = self.strategy.allocate([State("own", (2,), tf.float32, True), State("same", (), tf.int64, False)])
        assert (own.dtype, same.dtype) == (tf.float32, tf.int64)

        def replica_function():
            own.assign(own + tf.cast(self.strategy.collectives.rank, tf.float32) + 1.0)
            return tf.identity(own)

        run = tf.function(lambda: self.strategy.local(self.strategy.run(replica_function)), autograph=False)
        for times in (1, 2):
            for rank, value in enumerate(run()):
                np.testing.assert_array_equal(value, [times * (rank + 1)] * 2)
        assert int(self.strategy.local(same)[0]) == 0
