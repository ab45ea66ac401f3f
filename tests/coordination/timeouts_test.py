"""Ranks that load their data at different speeds: the first one waits for the others, and logs a warning."""

import logging
import threading

import keras
import numpy as np
import pytest

import tfdist
from tests.coordination.members import members
from tests.waiting import wait_for
from tfdist import train
from tfdist.config.train_config import TrainConfig
from tfdist.coordination import LocalGroup
from tfdist.coordination.group import long_timeout

# Gathers with a short deadline: all ranks arrive together, right after a gather with a long one or before any loading.
AT_ONCE = {"flags", "versions", "commits/place", "commits/hosts", "hosts", "output_dir/seen", "origin/seen", "commits"}


@pytest.fixture
def sync_points(monkeypatch):
    """Records the gathers of this process's group, as pairs of name and deadline."""
    held = []

    def gather(self, name, value, deadline=60.0):
        held.append((name, deadline))
        return original(self, name, value, deadline)

    original = LocalGroup.gather
    monkeypatch.setattr(LocalGroup, "gather", gather)
    return held


def impatient(sync_points):
    return {name for name, deadline in sync_points if deadline < 600} - AT_ONCE


def test_who_comes_late_is_waited_for_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr("tfdist.coordination.group.WARNING_SECONDS", 0.01)

    def come() -> None:
        wait_for(lambda: caplog.records)
        late.gather("data", 2)

    with members(2) as (here, late), caplog.at_level(logging.WARNING):
        coming = threading.Thread(target=come)
        coming.start()
        with long_timeout("its data") as deadline:
            assert here.gather("data", 1, deadline) == [1, 2]
        coming.join()
    (said,) = [record.getMessage() for record in caplog.records if "Other ranks" in record.getMessage()]
    assert said.startswith("Other ranks have not arrived for 0.01 s: one may be busy with its data.")


def test_nothing_is_said_where_all_come_at_once(monkeypatch, caplog):
    monkeypatch.setattr("tfdist.coordination.group.WARNING_SECONDS", 30.0)
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING), long_timeout("its data"):
        (timer,) = set(threading.enumerate()) - before
    timer.join(10.0)
    assert not timer.is_alive() and not caplog.records


def test_a_command_waits_for_ranks_that_load_and_build(sync_points, tmp_path):
    config = TrainConfig(
        strategy="single",
        model="mlp(hidden=(4,))",
        dataset="digits",
        steps=2,
        checkpoint_every="2",
        output_dir=str(tmp_path / "run"),
    )
    assert train.main(config) == 0
    data = {"data/form", "data/size"}
    assert data | {"output_dir", "origin", "origin/locked", "output_dir/made"} <= {name for name, _ in sync_points}
    assert not impatient(sync_points)


def test_a_program_waits_for_ranks_that_load_and_build(sync_points):
    single = tfdist.load_strategy("single", environment={})
    with single.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    trainer.fit((np.zeros((4, 2), "float32"), np.zeros((4, 2), "float32")), batch_size=4, steps=1)
    assert {"data/form", "data/size"} <= {name for name, _ in sync_points}
    assert not impatient(sync_points)
