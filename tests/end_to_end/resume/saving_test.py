"""When a run is saved, what happens if a checkpoint cannot be written, and how a run stops on request."""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

import tfdist
from tests.coordination.members import members
from tests.end_to_end.resume import exact_test
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, SAVED_AT, STEPS, fit, small_model, tensors
from tests.end_to_end.resume.sharing_test import Strategy
from tests.waiting import DEADLINE
from tfdist import checkpoints
from tfdist.checkpoint import manager, replication, restore
from tfdist.checkpoint.format import CheckpointError, complete_checkpoints, lock, step_of
from tfdist.coordination.sync_points import SyncPoints
from tfdist.errors import InputError, Preempted

make_trainer = functools.partial(exact_test.make_trainer, make=small_model)


def steps_of(directory) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(directory)]


class At(keras.callbacks.Callback):
    def __init__(self, step, action):
        super().__init__()
        self._step, self._action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= self._step:
            self._action()
            self._action = lambda: None


@pytest.mark.parametrize(("every", "saved"), [("3", [12, 9, 6, 3]), ("5", [12, 10, 5]), ("100", [12]), ("0", [])])
def test_every_so_many_steps_and_at_the_end(every, saved, single, tmp_path):
    fit(make_trainer(single), tmp_path, every=every)
    assert steps_of(tmp_path) == saved


@pytest.mark.parametrize(
    ("event", "stopped_at"), [({"on_train_batch_end": 3}, 4), ({"on_train_batch_end": 4}, 5), ({"on_epoch_end": 0}, 5)]
)
def test_a_run_that_a_callback_stops_is_saved_where_it_ends(event, stopped_at, single, tmp_path):
    """In the middle of an epoch, at its last step, and at its end."""
    trainer = make_trainer(single)
    [(name, number)] = event.items()

    def stop(index, logs=None):
        trainer.model.stop_training = trainer.model.stop_training or index >= number

    fit(trainer, tmp_path, every="100", callbacks=[keras.callbacks.LambdaCallback(**{name: stop})])
    assert trainer.step == stopped_at
    assert steps_of(tmp_path) == [stopped_at]


def test_every_so_many_seconds(mirrored2, tmp_path):
    """Saved at the end of the next call."""
    fit(make_trainer(mirrored2), tmp_path, every="0.01s", callbacks=[At(1, lambda: time.sleep(0.1))])
    assert steps_of(tmp_path)[0] == STEPS
    assert len(steps_of(tmp_path)) > 1


def heard(monkeypatch, ask):
    """Returns an action that asks a run to stop, and waits until the run has agreed to, which takes a thread its time."""
    agree, agreed = SyncPoints._agree, threading.Event()

    def noting(sync_points):
        agree(sync_points)
        agreed.set()

    def act():
        ask()
        assert agreed.wait(DEADLINE)

    monkeypatch.setattr(SyncPoints, "_agree", noting)
    return act


def test_a_run_that_is_asked_to_stop_is_saved_and_goes_on(mirrored2, tmp_path, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = At(4, heard(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Preempted, match=r"saved at step \d+ in .*Resume"):
        fit(exact_test.make_trainer(mirrored2), tmp_path / "parts", every="0", callbacks=[stop])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    [stopped] = steps_of(tmp_path / "parts")
    assert 4 <= stopped < STEPS
    resumed = exact_test.make_trainer(mirrored2)
    assert resumed.resume(tmp_path / "parts") == stopped
    fit(exact_test.make_trainer(mirrored2), tmp_path / "whole", every=str(STEPS))
    fit(resumed, tmp_path / "parts", every=str(STEPS))
    assert tensors(complete_checkpoints(tmp_path / "parts")[0]) == tensors(complete_checkpoints(tmp_path / "whole")[0])


def test_who_saves_nothing_leaves_signals_alone(single, tmp_path):
    seen = []
    before = signal.getsignal(signal.SIGTERM)
    look = At(1, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    make_trainer(single).fit((IMAGES, LABELS), batch_size=8, steps=2, callbacks=[look])
    assert seen == [before]


def test_what_cannot_be_written_ends_the_run(single, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    trainer = make_trainer(single)
    with pytest.raises(CheckpointError, match="Every rank must write its part"):
        fit(trainer, tmp_path / "checkpoints", every=3)
    assert 3 <= trainer.step < STEPS


def test_or_is_a_warning_and_tried_again(single, tmp_path, caplog):
    where = tmp_path / "checkpoints"
    where.write_text("in the way")
    saved = tfdist.Checkpoints(directory=str(where), every="3", strict=False)
    with caplog.at_level(logging.WARNING):
        make_trainer(single).fit(
            (IMAGES, LABELS),
            batch_size=8,
            steps=STEPS,
            schedule=tfdist.Schedule(steps_per_call=3),
            checkpoints=saved,
            callbacks=[At(8, where.unlink)],
        )
    assert caplog.text.count("The run continues") >= 1
    assert steps_of(where)[0] == STEPS


def test_training_goes_on_while_a_checkpoint_is_written(single, tmp_path, monkeypatch):
    written, going = threading.Event(), []
    write = replication.write_checkpoint

    def slow(*args, **named):
        assert written.wait(DEADLINE)
        return write(*args, **named)

    monkeypatch.setattr(replication, "write_checkpoint", slow)
    fit(
        make_trainer(single), tmp_path, callbacks=[At(STEPS, lambda: (going.append(steps_of(tmp_path)), written.set()))]
    )
    assert going == [[]]
    assert steps_of(tmp_path) == [STEPS, SAVED_AT]


def test_its_directory_is_the_run_s_own_until_it_has_ended(single, tmp_path, capsys):
    refused = []

    def look():
        with pytest.raises(InputError) as caught, lock(tmp_path):
            pass
        refused.append(str(caught.value))

    fit(make_trainer(single), tmp_path, every=5, callbacks=[At(8, look)])
    assert len(refused) == 1
    with lock(tmp_path):
        pass
    assert checkpoints.main(str(tmp_path)) == 0
    shown = [line[:20] for line in capsys.readouterr().out.splitlines()]
    assert shown == [f"step-{step:09d}  good" for step in (12, 10, 5)]


@pytest.mark.parametrize("reason", ["is in use", "has later checkpoints"])
def test_all_ranks_hear_that_a_directory_is_refused(reason, single, tmp_path):
    fit(make_trainer(single), tmp_path)

    def refused(group) -> str:
        options = tfdist.Checkpoints(directory=str(tmp_path))
        with (
            pytest.raises(InputError) as caught,
            manager.open_saver(options, Strategy(group), 0, lambda: None, lambda: None),
        ):
            pass
        return str(caught.value)

    in_use = reason == "is in use"
    with members(2) as joined, ThreadPoolExecutor(2) as pool, lock(tmp_path) if in_use else contextlib.nullcontext():
        [said] = set(pool.map(refused, joined))
    received = (
        f"{tmp_path}, which process {os.getpid()} on "
        if in_use
        else "starts at step 0 needs a checkpoint directory without"
    )
    assert received in said and ("one run at a time" if in_use else "step-000000012") in said
    assert steps_of(tmp_path) == [STEPS, SAVED_AT]


def test_where_files_cannot_be_locked_a_run_is_warned(single, tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        fit(make_trainer(single), tmp_path)
    assert steps_of(tmp_path) == [STEPS, SAVED_AT]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "lock: No locks available. Specify another directory. Another run could write there" in warning


def test_what_another_process_alone_cannot_read_is_not_damaged(single, tmp_path, monkeypatch):
    fit(make_trainer(single), tmp_path)

    class TwoRanks:
        rank = 0

        def gather(self, name, value, deadline):
            return [value, "it is missing."]

    trainer = make_trainer(single)
    state = trainer.program.run_variables(trainer.train_state.callbacks)
    with pytest.raises(CheckpointError, match="on rank 1: it is missing. It is valid on rank 0"):
        restore.restore(state, [str(path) for path in complete_checkpoints(tmp_path)], TwoRanks())
    assert steps_of(tmp_path) == [STEPS, SAVED_AT]
