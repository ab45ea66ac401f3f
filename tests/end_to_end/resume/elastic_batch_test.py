"""Runs that resume with a different number of replicas and keep the batch per replica: steps, learning rate and examples."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.end_to_end.resume.command_test import run
from tests.end_to_end.resume.exact_test import tensors
from tests.selection import quick
from tfdist import ledger
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.data import source
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.optimizers import LARS, WarmupAndDecay
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import NullLedger

RANDOM = np.random.default_rng(0)
SIZE, BATCH, SEED = 40, 12, 5
X = RANDOM.standard_normal((SIZE, 6))
Y = RANDOM.integers(0, 4, SIZE)
# (Number of replicas, last step); epoch 0 ends within the first batch of 8.
LEGS = ((3, 3), (2, 7), (1, 9), (3, 12))
BATCHES = [12] * 3 + [8] * 4 + [4] * 2 + [12] * 3
PLACES = np.cumsum([0, *BATCHES])
TOLERANCE = 1e-9
RATES = {
    "constant": lambda: 0.1,
    "schedule": lambda: WarmupAndDecay(0.1, warmup_steps=5, decay="cosine", total_steps=20),
}
OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "adamw": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    "lars": LARS,
}


@pytest.fixture(scope="module")
def strategies(single, mirrored2) -> dict[int, Strategy]:
    return {1: single, 2: mirrored2, 3: tfdist.load_strategy("mirrored", devices=3, environment={})}


class Used(NullLedger):
    """Records the examples of one process, in the order of use."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        self.numbers.extend(numbers.tolist())


def model() -> keras.Model:
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((6,)), *layers])


def make_trainer(strategy, optimizer="sgd", rate="constant", **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(
            model(), optimizer=OPTIMIZERS[optimizer](RATES[rate]()), loss=loss, seed=SEED, **options
        )
    trainer.build(tfdist.data.ArraySource((X, Y)))
    return trainer


def fit(trainer, directory, steps=0, elastic_batch="replica", batch_size=BATCH, data=(X, Y), **more):
    return trainer.fit(
        data,
        batch_size=batch_size,
        schedule=tfdist.Schedule(elastic_batch=elastic_batch, log_every=1, steps_per_call=2),
        steps=steps,
        checkpoints=tfdist.Checkpoints(directory=str(directory), every="100", keep=10),
        **more,
    )


def go_on(strategy, directory, steps=0, optimizer="sgd", rate="constant", **more):
    trainer = make_trainer(strategy, optimizer, rate)
    trainer.resume(directory)
    return trainer, fit(trainer, directory, steps, **more)


def weights(trainer):
    return [np.asarray(trainer.strategy.local(v.value)[0]) for v in trainer.model.trainable_variables]


def assert_as_by_hand(trainer, optimizer, rate, batches):
    """Compares with Keras's optimizer on one device, whose learning rate is set in proportion to each batch."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    made, given = model(), RATES[rate]()
    optimizer = OPTIMIZERS[optimizer](0.1)
    stream = source.indices(tf.range(sum(batches), dtype=tf.int64), SIZE, SEED).numpy()
    for step, batch in enumerate(batches):
        scale = batch / batches[0]
        rows, stream = stream[:batch], stream[batch:]
        with tf.GradientTape() as tape:
            logits = made(X[rows], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(Y[rows], logits)
            loss = tf.reduce_sum(losses) / batch
        optimizer.learning_rate = scale * float(given(step) if callable(given) else given)
        optimizer.apply(tape.gradient(loss, [v.value for v in made.trainable_variables]), made.trainable_variables)
    for found, wanted in zip(weights(trainer), made.trainable_variables, strict=True):
        assert np.linalg.norm(found - wanted.numpy()) <= TOLERANCE * np.linalg.norm(wanted.numpy())


METHODS = (("sgd", "constant"), ("sgd", "schedule"), ("adamw", "schedule"), ("lars", "constant"))


@pytest.mark.parametrize("method", quick(METHODS, ("adamw", "schedule")), ids="-".join)
def test_three_two_one_and_three_replicas(method, strategies, float64, tmp_path):
    """Weights, learning rates, epochs and examples are those of a hand-written loop."""
    optimizer, rate = method
    used, records = Used(), []
    for replicas, end in LEGS:
        trainer, history = go_on(
            strategies[replicas], tmp_path, end, optimizer, rate, reporting=tfdist.Reporting(ledger=used)
        )
        records += [record for record in history.records if record["kind"] == "train"]
        assert trainer.step == end
    assert_as_by_hand(trainer, optimizer, rate, BATCHES)
    stream = source.indices(tf.range(PLACES[-1], dtype=tf.int64), SIZE, SEED).numpy()
    assert used.numbers == stream.tolist()
    assert [record["epoch"] for record in records] == [place / SIZE for place in PLACES[1:]]
    given = RATES[rate]()
    wanted = [n / BATCH * float(given(step) if callable(given) else given) for step, n in enumerate(BATCHES)]
    np.testing.assert_allclose([record["learning_rate"] for record in records], wanted, rtol=1e-12)


def test_the_same_under_a_mesh(mesh2x2, single, float64, tmp_path):
    """On a mesh, replicas are the parts of a batch: two here, then one."""
    go_on(mesh2x2, tmp_path, 3, "adamw", "schedule")
    trainer, _ = go_on(single, tmp_path, 5, "adamw", "schedule")
    back, _ = go_on(mesh2x2, tmp_path, 6, "adamw", "schedule")
    for trained, batches in ((trainer, [12] * 3 + [6] * 2), (back, [12] * 3 + [6] * 2 + [12])):
        assert_as_by_hand(trained, "adamw", "schedule", batches)


def test_epochs_are_passes_over_the_data(strategies, tmp_path):
    """Three epochs end: after 36 + 8 examples, after 44 + 5 * 8 and, in batches of 12, after 84 + 3 * 12."""
    seen, evaluated = [], []
    ends = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch + 1),
        on_epoch_end=lambda epoch, logs: seen.append(f"end of {epoch}"),
    )
    data = ((X, Y), (X[:7], Y[:7]))
    go_on(strategies[3], tmp_path, 3, data=data)
    for replicas, epochs in ((2, 2), (3, 3)):
        trainer, history = go_on(strategies[replicas], tmp_path, epochs=epochs, data=data, callbacks=[ends])
        evaluated += [(r["step"], r["epoch"]) for r in history.records if r["kind"] == "eval"]
    assert trainer.step == 12
    ended = [(mark, step) for step, mark in zip(seen, seen[1:], strict=False) if isinstance(mark, str)]
    assert ended == [("end of 0", 4), ("end of 1", 9), ("end of 2", 12)]
    assert evaluated == [(4, 44 / SIZE), (9, 84 / SIZE), (12, 120 / SIZE)]
    assert trainer.evaluate((X[:7], Y[:7]), batch_size=4)["loss"] == pytest.approx(history.last("eval")["loss"])
    _, history = go_on(strategies[2], tmp_path, epochs=3, data=data)  # there is nothing to do
    assert history.records == []


def test_a_stop_behind_the_change_changes_no_bit(strategies, tmp_path, caplog):
    caplog.set_level("INFO", "tfdist")
    go_on(strategies[3], tmp_path / "parts", 3)
    shutil.copytree(tmp_path / "parts", tmp_path / "whole")
    go_on(strategies[2], tmp_path / "whole", 8)
    for steps in (5, 8):
        go_on(strategies[2], tmp_path / "parts", steps)
    whole, parts = (complete_checkpoints(tmp_path / name)[0] for name in ("whole", "parts"))
    assert tensors(whole) == tensors(parts)
    assert Checkpoint.open(whole).values == Checkpoint.open(parts).values
    assert "compression residuals" not in caplog.text, "without compression, nothing is kept"


def test_who_reads_and_sets_the_rate_has_that_of_the_beginning(strategies, tmp_path):
    """Otherwise, a learning rate that a callback lowers would be rescaled twice."""
    read = []

    class Halved(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            read.append(float(tf.convert_to_tensor(optimizer.learning_rate)))
            optimizer.learning_rate = read[-1] / 2

    go_on(strategies[3], tmp_path, 2)
    trainer, history = go_on(strategies[2], tmp_path, 6, callbacks=[Halved()])
    assert read == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert [r["learning_rate"] for r in history.records] == pytest.approx([rate * 2 / 3 for rate in read])
    assert float(tf.convert_to_tensor(trainer.model.optimizer.learning_rate)) == pytest.approx(0.00625)


def test_another_fit_begins_where_the_one_before_ended(single):
    """Each has its own batch size and the unscaled learning rate, and no example is repeated."""
    trainer, used = make_trainer(single), Used()
    for batch_size in (12, 8, 10):
        history = trainer.fit((X, Y), batch_size=batch_size, steps=1, reporting=tfdist.Reporting(ledger=used))
        assert history.last("train")["learning_rate"] == pytest.approx(0.1)
    trainer.fit((X, Y), batch_size=10, epochs=1, reporting=tfdist.Reporting(ledger=used))
    assert trainer.step == 7
    assert used.numbers[:40] == source.indices(tf.range(40, dtype=tf.int64), SIZE, SEED).numpy().tolist()


def test_a_batch_that_is_not_divided_is_refused(strategies, tmp_path):
    with pytest.raises(InputError, match=r"Received: batch_size=13 and 3 replicas. Use 12 or 15"):
        fit(make_trainer(strategies[3]), tmp_path, 2, batch_size=13)
    fit(make_trainer(strategies[3]), tmp_path, 2)
    with pytest.raises(InputError, match=r"batch_size=8 in a run that began with 12 on 3 replicas"):
        go_on(strategies[2], tmp_path, 4, batch_size=8)


def test_the_command_proves_its_examples_across_changes(tmp_path, capsys):
    """1437 examples: 2 steps of 300, 5 of 200 until the end of the first epoch, 5 of 300 until that of the second."""
    flags = {"strategy": "mirrored", "batch_size": 300, "elastic_batch": "replica", "optimizer": "sgd", "log_every": 1}
    path = tmp_path / "run"
    for devices, length in ((3, {"steps": 2}), (2, {"epochs": 1}), (3, {"epochs": 2})):
        run(path, devices=devices, **length, **flags)
    assert ledger.main(str(path)) == 0
    assert (
        "Proved: 12 steps, 3 attempts. Each of 1437 examples was used exactly once in each of 2 epochs; 226 in the next"
        in capsys.readouterr().out
    )
    starts = RunDirectory(path).read_starts()
    begun = [(start["step"], start["batch_size"], start["examples_before"]) for start in starts]
    assert begun == [(0, 300, 0), (2, 200, 600), (7, 300, 1600)]
    records = RunDirectory(path).records()
    seen = {record["step"]: round(record["epoch"] * 1437) for record in records}
    assert [seen[step] for step in (1, 2, 3, 7, 8, 12)] == [300, 600, 800, 1600, 1900, 3100]
    rates = {r["step"]: r["learning_rate"] for r in records if r["kind"] == "train"}
    assert [rates[step] for step in (2, 3, 7, 8)] == pytest.approx([0.001, 0.002 / 3, 0.002 / 3, 0.001])
    assert [r["step"] for r in records if r["kind"] == "eval"] == [7, 12]


def test_more_replicas_than_the_first_batch_had_examples(tmp_path):
    """The current batch has a row for each replica."""
    flags = {"strategy": "mirrored", "elastic_batch": "replica", "batch_size": 3}
    run(tmp_path / "run", devices=3, steps=1, **flags)
    run(tmp_path / "run", devices=4, steps=2, **flags)
    assert RunDirectory(tmp_path / "run").read_starts()[-1]["batch_size"] == 4
