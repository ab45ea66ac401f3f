"""`--all_reduce=auto`: a table by measurement, which is state; a table from a file repeats it."""

import functools

import keras
import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tests.trainer.diagnostics_test import DATA
from tfdist.checkpoint.format import Checkpoint
from tfdist.config.all_reduce import MAX_MESSAGE_BYTES, AlgorithmTable, Band, parse_table
from tfdist.trainer import auto_all_reduce, inspections
from tfdist.trainer.auto_all_reduce import explain, fastest_algorithms, measure, sizes_up_to
from tfdist.trainer.inspections import medians_of_slowest, time_interleaved

TIMES = {
    1024: {"engine": 2e-3, "ring": 4e-3, "tree": 1e-3},
    4096: {"engine": 2e-3, "ring": 4e-3, "tree": 1e-3},
    16384: {"engine": 2e-3, "ring": 1.9e-3, "tree": 3e-3},
    65536: {"engine": 8e-3, "ring": 4e-3, "tree": 9e-3},
}
TABLE = AlgorithmTable((Band(0, 8192, "tree"), Band(8193, 32768, "engine"), Band(32769, MAX_MESSAGE_BYTES, "ring")))


def test_the_fastest_by_more_than_noise_is_taken():
    assert fastest_algorithms(TIMES) == TABLE
    assert fastest_algorithms({1024: {"engine": 1.0, "ring": 0.95}}) == AlgorithmTable.uniform("engine")


def test_it_says_what_it_chose_and_why():
    assert explain(TABLE, TIMES) == [
        "sums up to 8.0 KiB use tree. Measured: 1.0 KiB: engine 2 ms, ring 4 ms, tree 1 ms; 4.0 KiB: engine 2 ms, ring "
        "4 ms, tree 1 ms.",
        "sums up to 32.0 KiB use engine. Measured: 16.0 KiB: engine 2 ms, ring 1.9 ms, tree 3 ms.",
        "larger sums use ring. Measured: 64.0 KiB: engine 8 ms, ring 4 ms, tree 9 ms.",
    ]
    assert explain(AlgorithmTable.uniform("engine"), {1024: {"engine": 1.0}}) == [
        "all sums use engine. Measured: 1.0 KiB: engine 1e+03 ms."
    ]


@pytest.mark.parametrize(("largest", "last"), [(1, 1024), (1024, 1024), (5000, 16384), (2**40, 64 * 2**20)])
def test_sizes_reach_the_largest_message(largest, last):
    sizes = sizes_up_to(largest)
    assert (sizes[0], sizes[-1]) == (1024, last)
    assert {b // a for a, b in zip(sizes, sizes[1:], strict=False)} <= {4}


def strategy_with(all_reduce):
    return tfdist.load_strategy("mirrored", devices=4, environment={}, all_reduce=all_reduce, topology="2,2")


def trainer_on(strategy):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return tfdist.Trainer(
            keras.Sequential([keras.Input((20,)), keras.layers.Dense(32), keras.layers.Dense(5)]),
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )


def fit(trainer, steps, directory=None, **reporting):
    return trainer.fit(
        DATA,
        batch_size=16,
        steps=steps,
        schedule=tfdist.Schedule(log_every=3, steps_per_call=2),
        checks=tfdist.Checks(measure_every=0),
        checkpoints=directory and tfdist.Checkpoints(directory=str(directory), every="3", keep=9),
        reporting=tfdist.Reporting(**reporting),
    )


def weights(trainer):
    return [np.array(v).tobytes() for v in [*trainer.model.variables, *trainer.model.optimizer.variables]]


def test_algorithms_are_measured():
    strategy = strategy_with("auto")
    times = measure(strategy, [1024, 4096])
    assert {tuple(found) for found in times.values()} == {
        ("engine", "ring", "tree", "halving_doubling", "hierarchical")
    }
    assert all(0 < seconds < 60 for found in times.values() for seconds in found.values())


def test_calls_take_turns_and_a_round_takes_as_long_as_on_its_slowest_process(monkeypatch):
    log = []
    monkeypatch.setattr(inspections, "seconds_of", lambda call: call() or 1.0)
    calls = {name: functools.partial(log.append, name) for name in ("a", "b")}
    assert time_interleaved(calls, lambda: log.append("together"), 2) == {"a": [1.0] * 2, "b": [1.0] * 2}
    assert log == ["together", "a", "together", "b", "together", "b", "together", "a"]
    of_processes = [{"a": [1.0, 9.0, 2.0], "b": [4.0]}, {"a": [3.0, 2.0, 2.5], "b": [3.0]}]
    assert medians_of_slowest(of_processes) == {"a": 3.0, "b": 4.0}


def test_the_table_is_state_and_a_file_repeats_it(monkeypatch, tmp_path, caplog):
    """Chosen before the first step; kept by a resumed run, which measures nothing; the same bits from the file."""
    measured = []
    monkeypatch.setattr(auto_all_reduce, "measure", lambda strategy, sizes: measured.append(sizes) or TIMES)
    tables = []
    whole = trainer_on(strategy_with("auto"))
    with caplog.at_level("INFO"):
        fit(whole, 9, tmp_path / "whole", record_all_reduce_table=tables.append)
    assert measured == [[1024, 4096]], "up to the bytes of all gradients"
    [text] = tables
    assert parse_table(text, "x") == TABLE == whole.strategy.tuned_collectives.table
    assert "auto: sums up to 8.0 KiB use tree." in caplog.text
    assert Checkpoint.open(tmp_path / "whole/step-000000003").values["all_reduce_table"] == [
        list(band) for band in TABLE.bands
    ]

    resumed = trainer_on(strategy_with("auto"))
    resumed.build(DATA)
    resumed.resume(tmp_path / "whole/step-000000003")
    fit(resumed, 9, tmp_path / "resumed")
    assert len(measured) == 1
    assert weights(resumed) == weights(whole)

    file = tmp_path / "all_reduce.csv"
    file.write_text(text)
    again = trainer_on(strategy_with(f"auto(table={file})"))
    fit(again, 9)
    assert weights(again) == weights(whole)
    assert len(measured) == 1 and again.program.steps.all_reduce_table == []


def test_another_number_of_replicas_measures_again(monkeypatch):
    monkeypatch.setattr(auto_all_reduce, "measure", lambda strategy, sizes: TIMES)
    trainer = trainer_on(strategy_with("auto"))
    trainer.build(DATA)
    trainer.program.steps.resume_all_reduce_table([list(band) for band in TABLE.bands], 3)
    assert trainer.program.steps.needs_all_reduce_table
    trainer.program.steps.resume_all_reduce_table([list(band) for band in TABLE.bands], 4)
    assert not trainer.program.steps.needs_all_reduce_table


@pytest.mark.parametrize("name", quick(["ring", "tree", "halving_doubling", "hierarchical"], "ring", "hierarchical"))
def test_each_algorithm_trains_like_the_engine(name):
    plain, other = trainer_on(strategy_with("engine")), trainer_on(strategy_with(name))
    for trainer in (plain, other):
        fit(trainer, 5)
    assert plain.strategy.tuned_collectives is None
    for a, b in zip(plain.model.weights, other.model.weights, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)
    again = trainer_on(strategy_with(name))
    fit(again, 5)
    assert weights(again) == weights(other)
