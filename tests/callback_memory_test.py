"""What is kept of callbacks, and what is not; `tests/resume/callbacks_test.py` has whole runs."""

import collections
import types

import keras
import ml_dtypes
import numpy as np
import pytest

from tfdist import callback_memory
from tfdist.callback_memory import CallbackMemory
from tfdist.checkpoint import Checkpoint, Damaged, commit
from tfdist.group import LocalGroup

OPTIMIZER = keras.optimizers.SGD(0.5)


class Own(keras.callbacks.Callback):
    """Has what it is given."""

    limit = 3  # an attribute of the class may be one of its objects, too

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)

    @property
    def fixed(self):
        """Nobody sets it."""
        return 1


def begun(*callbacks, saved=None):
    memory = CallbackMemory()
    if saved:
        memory.restore(saved)
    memory.attend(callbacks, OPTIMIZER)
    memory.begun()
    return memory


def saved(memory, directory):
    """A checkpoint on the disk with nothing but this."""
    values, parts = memory.now()
    path = commit(LocalGroup(), directory, parts, step=1, seed=0, flags={}, keep=1, values={"callbacks": values})
    return Checkpoint.open(path)


VALUES = {
    "none": None,
    "flag": True,
    "count": -(10**30),
    "text": "warm-up",
    "exact": 0.1 + 0.2,
    "infinite": [float("inf"), float("-inf")],
    "pair": (1, (2.5, None)),
    "table": {3: "three", "four": [4], (5, 6): {}},
    "single": np.float32(0.1),
    "narrow": ml_dtypes.bfloat16(0.1),
    "truth": np.bool_(True),
    "array": np.arange(6, dtype="float64").reshape(2, 3),
    "zero_axes": np.array(7, "int16"),
    "fortran": np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3)),
    "weights": [np.ones(2, "float32"), np.zeros((0, 4), "uint8")],
    "mixed": {"best": np.full(3, 0.5), "at": 4},
    "losses": {"val/loss": [1.5, float("nan")], "train/loss": [1 / n for n in range(1, 2000)]},
    "limit": 9,
    "_private": 1,
}


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, dict):
        same([*one], [*other])
        same([*one.values()], [*other.values()])
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.parametrize("name", VALUES)
def test_every_bit_comes_back(name, tmp_path):
    callback = Own()
    memory = begun(callback)
    setattr(callback, name, VALUES[name])
    other = Own()
    begun(other, saved=saved(memory, tmp_path))
    same(getattr(other, name), VALUES[name])


def test_nan_comes_back(tmp_path):
    callback, other = Own(), Own()
    memory = begun(callback)
    callback.best = float("nan")
    begun(other, saved=saved(memory, tmp_path))
    assert np.isnan(other.best)


@pytest.mark.parametrize(
    "value",
    [
        print,
        "/etc/passwd",
        "C:\\autoexec.bat",
        "best.weights.h5",
        "..",
        ["words of a list", "logs.csv"],
        ["word"] * 10_001,
        {1, 2},
        [1, object()],
        types.SimpleNamespace(a=1),
        np.array(["text"]),
        np.array([None]),
        np.datetime64("2020-01-01"),
        1j,
    ],
)
def test_what_is_more_than_data_begins_anew(value, tmp_path):
    callback = Own()
    memory = begun(callback)
    callback.kept, callback.left = 1, value
    assert memory.now() == ({"Own": {"kept": 1}}, [])


def test_what_the_program_gives_may_be_given_otherwise(tmp_path):
    callback, other = Own(patience=3, wait=0), Own(patience=5, wait=0)
    memory = begun(callback)
    callback.wait = 2
    begun(other, saved=saved(memory, tmp_path))
    assert (other.patience, other.wait) == (5, 2)


def test_what_holds_itself_begins_anew():
    table: dict = {}
    table["self"], deep = table, []
    for _ in range(5000):
        deep = [deep]
    memory = begun(Own(table=table, deep=deep, count=1))
    assert memory.now() == ({"Own": {}}, [])


def test_arrays_that_were_there_before_are_kept_if_they_have_changed(monkeypatch):
    for limit in (2**26, 0):  # by their content, and by what they are
        monkeypatch.setattr(callback_memory, "_HASHED_BYTES", limit)
        callback = Own(images=np.zeros(3), totals=[np.zeros(2), 5])
        memory = begun(callback)
        assert memory.now() == ({"Own": {}}, [])
        callback.images = np.ones(3)
        assert [part.name for part in memory.now().parts] == ["callbacks/Own/images"]
    callback = Own(totals=[np.zeros(2), 5])
    monkeypatch.undo()
    memory = begun(callback)
    callback.totals[0] += 1
    assert [part.name for part in memory.now().parts] == ["callbacks/Own/totals/0"]


def test_one_given_array_in_place_of_another_is_a_change():
    one, other = np.zeros(2), np.ones(2)
    callback = Own(all=[one, other], now=one)
    memory = begun(callback)
    callback.now = other
    assert memory.now().values == {"Own": {"now": {"array": "callbacks/Own/now"}}}


def test_an_array_that_changes_in_place_is_kept_as_it_is_now(tmp_path):
    callback = Own()

    def on_train_begin(logs=None):
        callback.total = np.zeros(2)

    memory = CallbackMemory()
    memory.attend([callback], OPTIMIZER)
    on_train_begin()
    memory.begun()
    callback.total += 3
    parts = memory.now().parts
    callback.total += 1
    assert [part.values.tolist() for part in parts] == [[3.0, 3.0]]


def test_callbacks_of_one_kind_are_told_apart(tmp_path):
    first, second = Own(), Own()
    memory = begun(first, second)
    first.wait, second.wait = 1, 2
    one, two, three = Own(), Own(), Own(wait=0)
    begun(one, two, three, saved=saved(memory, tmp_path))
    assert (one.wait, two.wait, three.wait) == (1, 2, 0)


def test_others_than_before_begin_anew(tmp_path):
    callback = Own()
    memory = begun(callback)
    callback.wait = 2
    stop = keras.callbacks.EarlyStopping(patience=4)
    begun(stop, saved=saved(memory, tmp_path))
    assert stop.wait == 0


def test_callbacks_that_watch_something_else_begin_anew(tmp_path):
    stop, other = keras.callbacks.EarlyStopping("loss"), keras.callbacks.EarlyStopping("accuracy")
    memory = begun(stop)
    stop.best = 0.5
    begun(other, saved=saved(memory, tmp_path))
    assert other.best is None


class Begins(Own):
    """Notes the rate with which the run began, and whether its epoch has just begun."""

    fresh = False

    def on_train_begin(self, logs=None):
        self.base, self.fresh = float(OPTIMIZER.learning_rate), True

    def on_epoch_begin(self, epoch, logs=None):
        self.fresh = True


def test_what_callbacks_set_when_a_run_begins_is_that_of_its_first_beginning(tmp_path):
    """Over two stops: in the second run there was nothing to change."""
    callback, path = Begins(base=None, fresh=False), None
    for rate in (0.5, 0.25, 0.125):
        OPTIMIZER.learning_rate = rate
        memory = CallbackMemory()
        if path:
            memory.restore(path)
        memory.attend([callback], OPTIMIZER)
        callback.on_train_begin()
        memory.begun()
        callback.on_epoch_begin(0)
        memory.epoch_begun(again=path is not None)
        assert (callback.base, callback.fresh) == (0.5, path is None)
        callback.fresh = False
        path, callback = saved(memory, tmp_path), Begins(base=None, fresh=False)
    OPTIMIZER.learning_rate = 0.5


def test_the_next_epoch_begins_as_always(tmp_path):
    callback = Begins(base=None, fresh=False)
    memory = begun(callback)
    callback.count = 1
    again = begun(callback, saved=saved(memory, tmp_path))
    again.epoch_begun(again=False)
    callback.count = 2
    again.epoch_begun(again=True)
    assert callback.count == 2


def test_what_a_beginning_opens_stays_open(tmp_path):
    callback = Own(file=None, count=0)
    memory = begun(callback)
    callback.file, callback.count = print, 3
    again = CallbackMemory()
    again.restore(saved(memory, tmp_path))
    other = Own(file=None, count=0)
    again.attend([other], OPTIMIZER)
    other.file = print
    again.begun()
    assert (other.file, other.count) == (print, 3)


def test_what_is_given_twice_is_not_the_callbacks_own(tmp_path):
    """The first time when the run begins again, the second time when its epoch does; callbacks change it between them."""
    callback, other = Own(), Own()
    memory = begun(callback)
    callback.names = [1]
    again = begun(other, saved=saved(memory, tmp_path))
    other.names.append(2)
    again.epoch_begun(again=True)
    assert other.names == [1]
    assert again.now().values == {"Own": {"names": [1]}}, "and is kept, as it was not there before"


def test_the_rate_comes_back_only_to_a_run_that_goes_on(tmp_path):
    optimizer = keras.optimizers.SGD(0.5)
    memory = begun(Own())
    path = saved(memory, tmp_path)
    for restored, rate in ((False, 0.1), (True, 0.5)):
        memory = CallbackMemory()
        if restored:
            memory.restore(path)
        optimizer.learning_rate = 0.5
        memory.attend([], optimizer)
        optimizer.learning_rate = 0.1  # as a scheduler does when an epoch begins
        memory.begun()
        assert float(optimizer.learning_rate) == pytest.approx(rate)


def test_a_schedule_that_a_callback_sets_stays(tmp_path):
    optimizer = keras.optimizers.SGD(0.5)
    memory = begun(Own())
    again = CallbackMemory()
    again.restore(saved(memory, tmp_path))
    again.attend([], optimizer)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer._learning_rate = schedule
    again.begun()
    assert optimizer._learning_rate is schedule


def test_the_next_run_of_a_trainer_knows_nothing(tmp_path):
    callback, other = Own(), Own(wait=0)
    memory = begun(callback)
    callback.wait = 2
    memory.restore(saved(memory, tmp_path))
    memory.attend([Own(wait=0)], OPTIMIZER)
    memory.begun()
    memory.attend([other], OPTIMIZER)
    memory.begun()
    assert other.wait == 0


def test_what_looks_like_state_and_cannot_be_kept_is_said_once(caplog):
    callback = Own(names={"a"}, queue=collections.deque(), model=object(), path="runs/log.csv")
    memory = begun(callback, keras.callbacks.EarlyStopping())
    callback.queue.append(1)
    memory.now()
    memory.now()
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in said] == ["Own.names", "Own.queue"]


@pytest.mark.parametrize(("wait", "patience", "over"), [(3, 3, True), (3, 9, False), (0, 3, False)])
def test_a_run_is_over_that_early_stopping_would_stop_again(wait, patience, over, tmp_path):
    stop = keras.callbacks.EarlyStopping(patience=3)
    memory = begun(stop)
    stop.wait, stop.stopped_epoch = wait, 5 if wait else 0
    again = begun(keras.callbacks.EarlyStopping(patience=patience), saved=saved(memory, tmp_path))
    assert again.is_over == over


def test_a_stranger_cannot_say_where_files_are_written():
    backup = keras.callbacks.BackupAndRestore("mine")
    begun(backup, saved=stranger({"BackupAndRestore": {"backup_dir": "src"}}))
    assert backup.backup_dir == "mine"


@pytest.mark.parametrize("attribute", ["_model", "params", "on_epoch_end", "fixed", "__class__"])
def test_a_stranger_cannot_set(attribute):
    callback = Own()
    before = getattr(callback, attribute, None)
    begun(callback, saved=stranger({"Own": {attribute: 5}}))
    assert getattr(callback, attribute, None) == before


@pytest.mark.parametrize(
    "values",
    [
        {"Own": {"file": "/etc/passwd"}},
        {"Own": {"x": {"array": "callbacks/there/is/none"}}},
        {"Own": {"x": [{"array": "callbacks/one"}, {"array": "callbacks/one"}]}},
        {"Own": {"x": {"scalar": "object", "value": 1}}},
        {"Own": {"x": {"scalar": "int8", "value": 300}}},
        {"Own": {"x": {"float": "0x1p99999"}}},
        {"Own": {"x": ".."}},
        {"Own": {"x": {"float": 3}}},
        {"Own": {"x": {"else": 3}}},
        {"Own": {"x": {"dict": [1], "keys": []}}},
        {"Own": [1]},
        [1],
    ],
)
def test_what_is_not_understood_is_damaged(values):
    with pytest.raises(Damaged, match="of callbacks is not understood"):
        CallbackMemory().restore(stranger(values))


def stranger(values):
    """A checkpoint as far as it is asked."""
    tensors = {"callbacks/one": np.zeros(2)}
    return types.SimpleNamespace(values={"callbacks": values}, path="step-1", tensors=tensors, read=tensors.__getitem__)
