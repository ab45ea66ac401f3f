"""What is kept of callbacks, and what is not; `tests/end_to_end/resume/callbacks_test.py` has whole runs."""

import collections
import types
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from tests.checkpoint.callback_values_test import VALUES, same
from tests.coordination.members import members
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.callback_state import CallbackState
from tfdist.checkpoint.format import Checkpoint, Damaged, commit
from tfdist.coordination import LocalGroup

OPTIMIZER = keras.optimizers.SGD(0.5)
ONE = LocalGroup()


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
    memory = CallbackState()
    if saved:
        memory.restore(saved)
    memory.attend(callbacks, OPTIMIZER)
    memory.begun(ONE)
    return memory


def saved(memory, directory):
    """A checkpoint on the disk with nothing but this."""
    values, parts = memory.now()
    path = commit(LocalGroup(), directory, parts, step=1, seed=0, flags={}, keep=1, values={"callbacks": values})
    return Checkpoint.open(path)


@pytest.mark.parametrize("name", VALUES)
def test_every_bit_comes_back(name, tmp_path):
    callback = Own()
    memory = begun(callback)
    setattr(callback, name, VALUES[name])
    other = Own()
    begun(other, saved=saved(memory, tmp_path))
    same(getattr(other, name), VALUES[name])


def test_what_is_more_than_data_begins_anew():
    callback = Own()
    memory = begun(callback)
    callback.kept, callback.left, callback.deep = 1, "/etc/passwd", [1, object()]
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
        monkeypatch.setattr(callback_state, "_HASHED_BYTES", limit)
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

    memory = CallbackState()
    memory.attend([callback], OPTIMIZER)
    on_train_begin()
    memory.begun(ONE)
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
        memory = CallbackState()
        if path:
            memory.restore(path)
        memory.attend([callback], OPTIMIZER)
        callback.on_train_begin()
        memory.begun(ONE)
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
    again = CallbackState()
    again.restore(saved(memory, tmp_path))
    other = Own(file=None, count=0)
    again.attend([other], OPTIMIZER)
    other.file = print
    again.begun(ONE)
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


def given():
    return {"losses": [], "table": {}, "total": np.zeros(2), "names": [1]}


def test_what_the_program_gave_stays_its_own_object(tmp_path):
    """It, and other callbacks, may have it."""
    before = given()
    callback = Own(**before)
    memory = begun(callback, Own(**before))
    callback.losses.append(0.5)
    callback.table["best"] = 1
    callback.total += 3
    path, now = saved(memory, tmp_path), given()
    writer, reader = Own(**now), Own(**now)
    begun(writer, reader, saved=path)
    assert (now["losses"], now["table"], now["total"].tolist(), now["names"]) == ([0.5], {"best": 1}, [3.0, 3.0], [1])
    for name, value in now.items():
        assert getattr(writer, name) is value and getattr(reader, name) is value


def test_two_that_shared_an_object_and_parted(tmp_path):
    shared = [1]
    callback = Own(now=shared, best=shared)
    memory = begun(callback)
    callback.now = [2]
    callback.best.append(3)
    path, shared = saved(memory, tmp_path), [1]
    other = Own(now=shared, best=shared)
    begun(other, saved=path)
    assert (other.now, other.best) == ([2], [1, 3])


def test_what_a_callback_finds_of_its_files_is_kept_out(tmp_path, monkeypatch):
    """Otherwise the second run would write a second line of titles into the middle."""
    monkeypatch.chdir(tmp_path)
    path = None
    for loss in (0.5, 0.25):
        log = keras.callbacks.CSVLogger("log.csv", append=True)
        memory = CallbackState()
        if path:
            memory.restore(path)
        memory.attend([log], OPTIMIZER)
        log.set_model(keras.Sequential())
        log.on_train_begin()
        memory.begun(ONE)
        log.on_epoch_begin(0)
        memory.epoch_begun(again=False)
        log.on_epoch_end(0, {"loss": loss, "val_loss": loss})
        log.on_train_end()
        path = saved(memory, tmp_path)
    assert (tmp_path / "log.csv").read_text().split() == ["epoch,loss,val_loss", "0,0.5,0.5", "0,0.25,0.25"]


class Noting(Own):
    def on_train_begin(self, rank):
        self.rank, self.is_chief, self.count = rank, rank == 0, 0


def test_what_a_process_notes_of_itself_is_its_own(tmp_path):
    """Of what they note alike, rank 0's goes on."""
    callback = Noting()
    memory = begun(callback)
    callback.on_train_begin(0)
    callback.count = 5
    path = saved(memory, tmp_path)
    ours = [Noting(), Noting()]

    def begin(group):
        again = CallbackState()
        again.restore(path)
        again.attend([ours[group.rank]], OPTIMIZER)
        ours[group.rank].on_train_begin(group.rank)
        again.begun(group)

    with members(2) as groups, ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, groups))
    assert [(one.rank, one.is_chief, one.count) for one in ours] == [(0, True, 5), (1, False, 5)]


def test_large_arrays_of_the_run_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(callback_state, "_MANY_BYTES", 100)
    callback = Own(given=np.zeros(50))
    memory = begun(callback)
    callback.images, callback.few = np.zeros(50), np.zeros(5)
    memory.now()
    memory.now()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Own.images has 0 MiB, which each checkpoint and commit copies")


def test_the_rate_comes_back_only_to_a_run_that_goes_on(tmp_path):
    optimizer = keras.optimizers.SGD(0.5)
    memory = begun(Own())
    path = saved(memory, tmp_path)
    for restored, rate in ((False, 0.1), (True, 0.5)):
        memory = CallbackState()
        if restored:
            memory.restore(path)
        optimizer.learning_rate = 0.5
        memory.attend([], optimizer)
        optimizer.learning_rate = 0.1  # as a scheduler does when an epoch begins
        memory.begun(ONE)
        assert float(optimizer.learning_rate) == pytest.approx(rate)


def test_a_schedule_that_a_callback_sets_stays(tmp_path):
    optimizer = keras.optimizers.SGD(0.5)
    memory = begun(Own())
    again = CallbackState()
    again.restore(saved(memory, tmp_path))
    again.attend([], optimizer)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer._learning_rate = schedule
    again.begun(ONE)
    assert optimizer._learning_rate is schedule


def test_the_next_run_of_a_trainer_knows_nothing(tmp_path):
    callback, other = Own(), Own(wait=0)
    memory = begun(callback)
    callback.wait = 2
    memory.restore(saved(memory, tmp_path))
    memory.attend([Own(wait=0)], OPTIMIZER)
    memory.begun(ONE)
    memory.attend([other], OPTIMIZER)
    memory.begun(ONE)
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
        {"Own": [1]},
        [1],
    ],
)
def test_what_is_not_understood_is_damaged(values):
    with pytest.raises(Damaged, match="of callbacks is not understood"):
        CallbackState().restore(stranger(values))


def stranger(values):
    """A checkpoint as far as it is asked."""
    tensors = {"callbacks/one": np.zeros(2)}
    return types.SimpleNamespace(values={"callbacks": values}, path="step-1", tensors=tensors, read=tensors.__getitem__)
