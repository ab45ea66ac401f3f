"""Differences between ranks are named before training; failure_detection_test.py has real processes."""

import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from tests.coordination.members import members
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.trainer import consistency


@pytest.fixture
def agreed():
    """Lets three ranks compare their mappings; returns what each raised, or None."""
    with members(3) as joined, ThreadPoolExecutor(3) as pool:

        def run(*mappings, **options):
            calls = [
                pool.submit(consistency.agree, m, "part ", mine, **options)
                for m, mine in zip(joined, mappings, strict=True)
            ]
            return [call.exception() for call in calls]

        yield run


MANY = {f"n{i}": str(i) for i in range(1000)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}, {}, {}], None),
        (
            [{}, {"n700": "x", "n900": "y"}, {"n800": "z"}],
            'part n700 differs: ranks 0, 2 have "700", rank 1 has "x". It must be the same on every process.',
        ),
        ([{}, {}, {"more": "1"}], 'part more differs: ranks 0, 1 have nothing, rank 2 has "1".'),
        ([{"more": "1"}, {}, {}], 'part more differs: rank 0 has "1", ranks 1, 2 have nothing.'),
    ],
)
def test_the_first_that_differs_is_named_on_every_rank(agreed, changes, message):
    said = agreed(*(MANY | change for change in changes))
    if message is None:
        assert said == [None] * 3
        return
    assert all(isinstance(error, InputError) for error in said)
    assert len({str(error) for error in said}) == 1 and str(said[0]).startswith(message)


def test_what_only_some_have_may_be_passed_over(agreed):
    assert agreed(MANY | {"a": "1"}, MANY, MANY | {"b": "1"}, common=True) == [None] * 3
    said = agreed(MANY | {"a": "1"}, MANY | {"a": "2"}, MANY, common=True)
    assert str(said[2]).startswith('part a differs: rank 0 has "1", rank 1 has "2", rank 2 has nothing.')


def network(activation="relu", width=4):
    layers = [keras.Input((3,)), keras.layers.Dense(width, activation=activation), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def differing(one, other):
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def test_models_that_were_made_alike_are_described_alike_whatever_was_made_before():
    first = consistency.described(network())
    assert differing(first, consistency.described(network())) == []


def test_forms_come_before_settings():
    found = differing(consistency.described(network()), consistency.described(network(width=5)))
    assert found[0] == "variable sequential/dense/kernel"
    assert "layer dense: units" in found


def test_settings_without_a_form_are_compared_too():
    assert differing(consistency.described(network()), consistency.described(network("tanh"))) == [
        "layer dense: activation"
    ]
    other = network()
    other.optimizer.momentum = 0.5
    assert differing(consistency.described(network()), consistency.described(other)) == ["optimizer sgd: momentum"]


def test_a_layer_that_does_not_know_what_it_is_made_of():
    class Odd(keras.layers.Layer):
        def get_config(self):
            raise NotImplementedError

    assert [*consistency._settings("layer odd", Odd())] == [("layer odd: class", "Odd")]


def test_own_modules_are_hashed_and_installed_ones_not(tmp_path, monkeypatch):
    file = tmp_path / "of_alike_test.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("of_alike_test")
    before = consistency.own_code()
    assert "consistency.py (module tfdist.trainer.consistency)" in before
    assert not [key for key in before if "module keras" in key or "module json" in key]
    file.write_text("x = 2\n")
    assert consistency.own_code() == before  # the hash is that of the code that runs
    consistency._hash.cache_clear()  # as in a new process
    assert differing(before, consistency.own_code()) == ["of_alike_test.py (module of_alike_test)"]
    file.unlink()  # as for code in an archive, which cannot be compared
    consistency._hash.cache_clear()
    assert "of_alike_test.py (module of_alike_test)" not in consistency.own_code()
    sys.modules.pop("of_alike_test")


def test_one_process_agrees_with_itself():
    consistency.check_equal(LocalGroup(), network())
