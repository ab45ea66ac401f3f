"""Saving and restoring the state of callbacks; `tests/end_to_end/resume/callbacks_test.py` tests complete runs."""

import types

import keras
import numpy as np
import pytest

from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, write_checkpoint
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError

OPTIMIZER = keras.optimizers.SGD(0.5)
CONTAINS_ITSELF: dict = {}
CONTAINS_ITSELF["self"] = CONTAINS_ITSELF


class Counter(keras.callbacks.Callback):
    """A callback with a state."""

    def __init__(self, state=None):
        super().__init__()
        self.state = {} if state is None else state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Stop(keras.callbacks.EarlyStopping):
    """Has a state in addition to Keras's."""

    extra = 0

    def state_dict(self):
        return {"extra": self.extra}

    def load_state_dict(self, state):
        self.extra = state["extra"]


class Forgets(keras.callbacks.Callback):
    """Has an attribute but no `state_dict`."""

    def __init__(self):
        super().__init__()
        self.count = 5


def begun(*callbacks, saved=None, is_chief=True):
    states = CallbackStates(is_chief)
    if saved:
        states.restore(saved)
    states.start(callbacks, OPTIMIZER)
    for callback in callbacks:
        callback.on_train_begin()
    states.after_train_begin()
    return states


def saved(states, directory):
    """Returns a checkpoint on disk that contains only these states."""
    values, parts = states.save()
    path = write_checkpoint(
        LocalGroup(), directory, parts, step=1, seed=0, flags={}, keep=1, values={"callbacks": values}
    )
    return Checkpoint.open(path)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records]


def test_state_dict_comes_back_with_its_arrays(tmp_path, caplog):
    counter = Counter({"steps": 3, "sums": [np.ones(2), np.zeros(3, "int8")], 7: (0.1, "x")})
    other = Counter()
    begun(other, saved=saved(begun(counter), tmp_path))
    assert [other.state[key] for key in ("steps", 7)] == [3, (0.1, "x")]
    assert [(a.dtype.name, a.tolist()) for a in other.state["sums"]] == [("float64", [1, 1]), ("int8", [0, 0, 0])]
    assert not warnings(caplog)


def test_callbacks_of_keras_need_none(tmp_path, caplog):
    stop = keras.callbacks.EarlyStopping("loss", patience=3)
    states = begun(stop)
    stop.best, stop.wait, stop.best_weights = 0.25, 2, [np.ones(2, "float32")]
    other = keras.callbacks.EarlyStopping("loss", patience=9)
    begun(other, saved=saved(states, tmp_path))
    assert (other.best, other.wait, other.patience, other.best_weights[0].tolist()) == (0.25, 2, 9, [1, 1])
    assert not warnings(caplog)


def test_a_subclass_adds_to_the_state_of_its_base(tmp_path):
    stop, other = Stop("loss"), Stop("loss")
    states = begun(stop)
    stop.wait, stop.extra = 2, 3
    begun(other, saved=saved(states, tmp_path))
    assert (other.wait, other.extra) == (2, 3)


def test_the_values_are_those_at_the_time_of_the_save():
    counter = Counter({"total": np.zeros(2), "names": []})
    values, [part] = begun(counter).save()
    counter.state["total"] += 1
    counter.state["names"].append(1)
    assert part.values.tolist() == [0, 0]
    assert values["Counter"]["state_dict()"]["dict"] == [{"array": part.name}, []]


def test_callbacks_of_a_class_are_told_apart_by_their_order_and_metric(tmp_path):
    given = [Counter({"n": 1}), Counter({"n": 2}), Stop("loss"), Stop("accuracy")]
    states = begun(*given)
    given[2].extra, given[3].extra = 3, 4
    others = [Stop("accuracy"), Counter(), Counter(), Counter(), Stop("loss"), Stop("val_loss")]
    begun(*others, saved=saved(states, tmp_path))
    assert [c.extra if isinstance(c, Stop) else c.state.get("n") for c in others] == [4, 1, 2, None, 3, 0]


def test_a_state_is_loaded_again_after_an_epoch_that_begins_again(tmp_path):
    path = saved(begun(Counter({"names": [1]})), tmp_path)
    for again in (True, False):
        counter = Counter()
        states = begun(counter, saved=path)
        assert states.resumes
        counter.state["names"].append(2)  # changes the callback's own copy when the epoch begins
        states.after_epoch_begin(is_resumed=again)
        assert counter.state["names"] == ([1] if again else [1, 2])
        counter.state["names"].append(3)
        states.after_epoch_begin(is_resumed=True)
        assert not states.resumes and counter.state["names"][-1] == 3, "the epochs after it begin as always"


def test_the_next_run_of_a_trainer_resumes_nothing(tmp_path):
    states = begun(Counter({"n": 1}), saved=saved(begun(Counter({"n": 1})), tmp_path))
    other = Counter()
    states.start([other], OPTIMIZER)
    states.after_train_begin()
    assert not states.resumes and other.state == {}


def test_only_rank_0_copies_arrays_and_warns(caplog):
    forgets = Forgets()
    states = begun(Counter({"sum": np.ones(2)}), forgets, is_chief=False, saved=checkpoint({"Gone": {"n": 1}}))
    forgets.count = 6
    values, parts = states.save()
    assert list(values) == ["Counter", "Forgets"] and not parts
    assert not warnings(caplog)


def test_callbacks_that_are_not_saved_are_named_once_when_they_have_changed(caplog):
    stop, log, counter = Stop("loss"), keras.callbacks.LambdaCallback(), Counter()
    first, second, third = Forgets(), Forgets(), Forgets()
    states = begun(counter, stop, log, first, second, third)
    states.save()
    assert not warnings(caplog), "they may have no state"
    counter.state, stop.wait, log.count, second.count, third.more = {"n": 1}, 1, 1, 6, 1
    states.save()
    first.count = 7
    states.save()
    [line] = warnings(caplog)
    expected = "Checkpoints do not contain the attributes of Forgets#2, Forgets#3: a resumed run starts with"
    assert line.startswith(expected)


def test_state_that_no_callback_takes_is_named_once(tmp_path, caplog):
    values = {
        "Forgets": {"count": 6},
        "Counter": {"n": 1},
        "CSVLogger": {"keys": ["loss"]},
        "Stop:loss": {"state_dict()": {"dict": [1], "keys": ["extra"]}, "wait": 2},
        "Gone": {"state_dict()": {"dict": [], "keys": []}},
        "Prints": {},
    }
    counter, forgets, stop, log = Counter(), Forgets(), Stop("loss"), keras.callbacks.CSVLogger(tmp_path / "log.csv")
    begun(counter, forgets, stop, log, saved=checkpoint(values))
    log.on_train_end()
    assert (counter.state, forgets.count, stop.wait, stop.extra) == ({}, 5, 2, 1)
    [line] = warnings(caplog)
    expected = (
        "These callback states in the checkpoint are not restored: Forgets, Counter, Gone. Either this run has no"
    )
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("state", "received"),
    [
        ({"seen": {"a"}}, "from Counter: {'a'} of type set"),
        ({"model": keras.Sequential()}, "of type Sequential"),
        (CONTAINS_ITSELF, "from Counter: maximum recursion depth exceeded"),
    ],
)
def test_a_state_that_cannot_be_saved(state, received):
    words = f"must consist of numbers, .* Received, .*{received}.* Convert it in state_dict"
    with pytest.raises(InputError, match=words):
        begun(Counter(state), is_chief=False).save()


def test_a_state_must_be_a_dict():
    counter = Counter()
    counter.state = None
    with pytest.raises(InputError, match=r"state_dict\(\) must return a dict. Received, from Counter: None."):
        begun(counter).save()


def test_the_learning_rate_is_restored_only_in_a_run_that_resumes(tmp_path):
    path = saved(begun(), tmp_path)
    for resumes, rate in ((False, 0.1), (True, 0.5)):
        optimizer, states = keras.optimizers.SGD(0.5), CallbackStates(True)
        if resumes:
            states.restore(path)
        states.start([], optimizer)
        for event in (states.after_train_begin, lambda s=states: s.after_epoch_begin(is_resumed=True)):
            optimizer.learning_rate = 0.1  # as a callback sets it
            event()
            assert float(optimizer.learning_rate) == pytest.approx(rate)


def test_a_schedule_that_a_callback_sets_stays(tmp_path):
    optimizer, states = keras.optimizers.SGD(0.5), CallbackStates(True)
    states.restore(saved(begun(), tmp_path))
    states.start([], optimizer)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer._learning_rate = schedule
    states.after_train_begin()
    assert optimizer._learning_rate is schedule


@pytest.mark.parametrize(("wait", "patience", "over"), [(3, 3, True), (3, 9, False), (0, 3, False)])
def test_a_run_is_over_that_early_stopping_would_stop_again(wait, patience, over, tmp_path):
    stop = keras.callbacks.EarlyStopping(patience=3)
    states = begun(stop)
    stop.wait, stop.stopped_epoch = wait, 5 if wait else 0
    again = begun(keras.callbacks.EarlyStopping(patience=patience), saved=saved(states, tmp_path))
    assert again.is_over == over


def test_a_foreign_checkpoint_sets_no_other_attribute():
    backup, counter = keras.callbacks.BackupAndRestore("mine"), Counter()
    attributes = {"backup_dir": "src", "_weights_path": "src/x", "on_train_end": None, "__class__": "x", "_model": 1}
    values = {"BackupAndRestore": attributes, "Counter": {**attributes, "state": {"dict": [], "keys": []}}}
    before = [dict(vars(backup)), dict(vars(counter))]
    states = CallbackStates(True)
    states.restore(checkpoint(values))
    states.start([backup, counter], OPTIMIZER)
    states.after_train_begin()
    assert [vars(backup), vars(counter)] == before


@pytest.mark.parametrize(
    "values",
    [
        {"Counter": {"state_dict()": {"array": "callbacks/there/is/none"}}},
        {"Counter": {"state_dict()": {"__reduce__": ["os.system", "x"]}}},
        {"Counter": {"state_dict()": {"scalar": "object", "value": 1}}},
        {"Counter": {"state_dict()": {"float": "0x1p99999"}}},
        {"Counter": {"state_dict()": {"float": 3}}},
        {"Counter": {"state_dict()": {"dict": [1], "keys": []}}},
        {"Counter": [1]},
        [1],
    ],
)
def test_what_is_not_understood_is_damaged(values):
    with pytest.raises(CorruptCheckpointError, match="its callback state cannot be read"):
        CallbackStates(True).restore(checkpoint(values))


def checkpoint(values):
    """Returns a fake checkpoint with the attributes that are read."""
    tensors = {"callbacks/one": np.zeros(2)}
    return types.SimpleNamespace(values={"callbacks": values}, path="step-1", read=tensors.__getitem__)
