"""Differences between ranks are named before training; failure_detection_test.py has real processes."""

import sys

import keras

from tfdist.trainer import program


def network(activation="relu", width=4):
    layers = [keras.Input((3,)), keras.layers.Dense(width, activation=activation), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def differing(one, other):
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def test_models_that_were_made_alike_are_described_alike_whatever_was_made_before():
    first = program.model_description(network())
    assert differing(first, program.model_description(network())) == []


def test_forms_come_before_settings():
    found = differing(program.model_description(network()), program.model_description(network(width=5)))
    assert found[0] == "variable sequential/dense/kernel"
    assert "layer dense: units" in found


def test_settings_without_a_form_are_compared_too():
    assert differing(program.model_description(network()), program.model_description(network("tanh"))) == [
        "layer dense: activation"
    ]
    other = network()
    other.optimizer.momentum = 0.5
    assert differing(program.model_description(network()), program.model_description(other)) == [
        "optimizer sgd: momentum"
    ]


def test_a_layer_that_does_not_know_what_it_is_made_of():
    class Odd(keras.layers.Layer):
        def get_config(self):
            raise NotImplementedError

    assert [*program._settings("layer", Odd())] == [("layer odd: class", "Odd")]


def test_own_modules_are_hashed_and_installed_ones_not(tmp_path, monkeypatch):
    file = tmp_path / "of_alike_test.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("of_alike_test")
    before = program.code_hashes()
    assert "program.py (module tfdist.trainer.program)" in before
    assert not [key for key in before if "module keras" in key or "module json" in key]
    file.write_text("x = 2\n")
    assert program.code_hashes() == before  # the hash is that of the code that runs
    program._hash.cache_clear()  # as in a new process
    assert differing(before, program.code_hashes()) == ["of_alike_test.py (module of_alike_test)"]
    file.unlink()  # as for code in an archive, which cannot be compared
    program._hash.cache_clear()
    assert "of_alike_test.py (module of_alike_test)" not in program.code_hashes()
    sys.modules.pop("of_alike_test")
