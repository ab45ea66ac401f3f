"""A module's import may be refused or followed by an action; other imports are as before."""

import importlib
import sys

import pytest

from tests import tensorflow_import

NAME = "a_module_of_this_test"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module that can be imported."""
    (tmp_path / f"{NAME}.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    sys.modules.pop(NAME, None)


def test_an_action_follows_the_first_import():
    values = []
    tensorflow_import.on_import(lambda module: values.append(module.value), NAME)
    assert not values
    importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert values == [3]
    tensorflow_import.on_import(lambda module: values.append(-module.value), NAME)  # it is imported already
    assert values == [3, -3]


def test_a_refused_import_fails_each_time_with_the_reason():
    tensorflow_import.refuse("for a reason", NAME)
    for _ in range(2):
        with pytest.raises(ImportError, match="for a reason"):
            importlib.import_module(NAME)
    assert NAME not in sys.modules


@pytest.mark.tensorflow
def test_tensorflow_has_four_logical_devices():
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == tensorflow_import.LOGICAL_DEVICES == 4
