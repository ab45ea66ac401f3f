"""Inspections between steps: they measure, choose and guard without changing the training."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import NoCommunication, OneReplica, RecordedCall
from tfdist.collectives.rows import hide_row_count
from tfdist.gradients import Bucketed, ErrorFeedback, Sum
from tfdist.trainer.auto_compression import Cost, Link, fastest_method, measure
from tfdist.trainer.pipeline_timeline import advice
from tfdist.trainer.replica_divergence import ErrorObserver

DATA = (
    np.random.default_rng(0).standard_normal((64, 20)).astype("float32"),
    np.random.default_rng(1).integers(0, 5, 64),
)


def make(strategy, compression="none", **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((20,)), keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.Dense(5)]
        )
        return tfdist.Trainer(
            model,
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            compression=compression,
            compression_min_bytes=500,
            **options,
        )


def weights(trainer):
    return [np.array(v) for v in [*trainer.model.variables, *trainer.model.optimizer.variables]]


def test_looking_leaves_the_training_as_it_was(mirrored2):
    """Weights, slots, moving statistics, error feedback and logs are equal bit for bit."""
    runs = []
    for checks in (tfdist.Checks(measure_every=0), tfdist.Checks(measure_every=4, compression_check_every=3)):
        trainer = make(mirrored2, "topk(ratio=0.2)")
        history = trainer.fit(DATA, batch_size=16, steps=9, schedule=tfdist.Schedule(log_every=3), checks=checks)
        state = [array.values for array in trainer.state.values()]
        runs.append(([*weights(trainer), *state], [(r["loss"], r["accuracy"]) for r in history.records], history))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert runs[0][1] == runs[1][1]
    plain, looked = (run[2].records[-1] for run in runs)
    assert "exposed_communication_seconds" not in plain
    assert looked["exposed_communication_seconds"] >= 0
    assert looked["codec_seconds"] >= 0
    assert 0 < looked["compression_error"] < 1
    assert 0 < looked["compression_cosine"] < 1
    assert looked["compression_ratio"] > 1


def by_numpy(y, x):
    """A loss whose weights depend on all rows."""
    weights = tf.numpy_function(lambda x: np.abs(x[:, 0] - np.median(x)), [x], x.dtype)
    return tf.reduce_mean(tf.ensure_shape(weights, [None])[:, None] * x**2)


class OneNumber(keras.layers.Layer):
    """Draws a number for all rows, so that each replica computes the whole batch."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return x * keras.random.uniform((), seed=self.seeds) if training else x


@pytest.mark.parametrize("layers", [[], [OneNumber]], ids=["partitioned", "whole"])
@pytest.mark.parametrize("batch_size, balance", [(5, "equal"), (8, "weights(3,1)"), (8, "measured")])
def test_looking_at_rows_of_other_replicas(layers, batch_size, balance, mirrored2, caplog):
    """Steps are timed without communication, but with all rows of replicas that have different numbers of them."""
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        model = keras.Sequential([keras.Input((20,)), *[layer() for layer in layers], keras.layers.Dense(3)])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(1e-3), loss=by_numpy, balance=balance)
    checks = tfdist.Checks(measure_every=4)
    history = trainer.fit(DATA, batch_size=batch_size, steps=5, schedule=tfdist.Schedule(log_every=1), checks=checks)
    assert history.records[-1]["exposed_communication_seconds"] >= 0
    has_no_effect = "balance=measured has no effect: a step of sequential needs all rows" in caplog.text
    assert has_no_effect == (balance == "measured" and bool(layers))


def test_the_error_of_watched_tensors_is_that_of_their_sum_with_the_kept_part():
    specs = [tf.TensorSpec([2], tf.float32, name) for name in ("a", "b")]
    inner = ErrorFeedback(Bucketed(Sum()))
    reducer = ErrorObserver(inner, specs, ["b"])
    kept = [tf.constant([1.0, 0.0]), tf.constant([0.0, 4.0])]
    reducer.reduce([tf.constant([5.0, 5.0]), tf.constant([3.0, 0.0])], kept, OneReplica(), name="gradients")
    assert [[float(x) for x in each] for each in reducer.observations] == [pytest.approx([0.0, 1.0], abs=1e-6)]


def test_the_guard_gives_up_what_errs_too_much(mirrored2, caplog):
    """From the inspected step on; the accumulated error is sent, and remains 0."""
    trainer = make(mirrored2, "size>=600: topk(ratio=0.1); *: topk(ratio=0.99)")
    with caplog.at_level("WARNING", "tfdist"):
        history = trainer.fit(
            DATA,
            batch_size=16,
            steps=8,
            schedule=tfdist.Schedule(log_every=1),
            checks=tfdist.Checks(compression_check_every=4, compression_max_error=0.3),
        )
    assert trainer.program.steps.overrides == {"sequential/dense/kernel": "none(feedback=True)"}
    assert "From step 4 on, the gradient of sequential/dense/kernel is reduced without compression" in caplog.text
    ratios = [record["compression_ratio"] for record in history.records]
    assert ratios[3] > ratios[4]
    assert not np.any(trainer.state["sequential/dense/kernel/error"].values)
    assert np.any(trainer.state["sequential/dense_1/kernel/error"].values)


def test_what_was_kept_is_sent_when_compression_is_given_up(mirrored2):
    """The first exact sum includes the accumulated error of all replicas, which is 0 from then on."""

    def made(compression):
        trainer = make(mirrored2, compression)
        trainer.model.optimizer.momentum = 0.0
        trainer.build(DATA)
        return trainer

    def step(trainer):
        trainer.fit(DATA, batch_size=16, steps=1)
        return trainer.model.get_weights()

    exact, compressed = made("none"), made("topk(ratio=0.1)")
    first = step(compressed)
    kept = compressed.state["sequential/dense/kernel/error"].values
    assert np.any(kept)
    compressed.program.steps.use_exact_sums([spec.name for spec in compressed.program.steps.compressible()])
    second, *_ = step(compressed)
    assert not np.any(compressed.state["sequential/dense/kernel/error"].values)

    step(exact)
    exact.model.set_weights(first)
    wanted, *_ = step(exact)
    np.testing.assert_allclose(second - wanted, -0.1 * np.sum(kept, axis=0), rtol=1e-4, atol=1e-7)


def test_auto_chooses_by_what_was_measured(mirrored2, monkeypatch, caplog):
    """On a link of 1 kB/s the smallest message wins; the choice is part of the state, and takes effect at its step."""
    slow = Link(latency=1e-6, bandwidth=1e3, replicas=2)
    monkeypatch.setattr("tfdist.trainer.auto_compression.measure", lambda strategy: slow)
    trainer = make(mirrored2, "auto(after=3, allow='topk(ratio=0.01)')")
    with caplog.at_level("INFO", "tfdist"):
        history = trainer.fit(DATA, batch_size=16, steps=6, schedule=tfdist.Schedule(log_every=1))
    ratios = [record["compression_ratio"] for record in history.records]
    assert ratios[:3] == [1.0] * 3
    assert min(ratios[3:]) > 2
    choice = trainer.state["compression/choice"]
    assert not choice.per_replica
    names = [spec.name for spec in trainer.program.steps.specs]
    assert dict(zip(names, choice.values.tolist(), strict=True))["sequential/dense/kernel"] == 1
    assert "sequential/dense/kernel uses topk(ratio=0.01)" in caplog.text


def test_what_auto_chose_is_state_of_the_run_that_goes_on(mirrored2, monkeypatch, tmp_path):
    slow = Link(latency=1e-6, bandwidth=1e3, replicas=2)
    monkeypatch.setattr("tfdist.trainer.auto_compression.measure", lambda strategy: slow)
    method = "auto(after=1, allow='topk(ratio=0.01)')"
    trainer = make(mirrored2, method)
    trainer.fit(DATA, batch_size=16, steps=3, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every="3"))
    again = make(mirrored2, method)
    again.build(tfdist.data.ArraySource(DATA))
    assert again.resume(tmp_path) == 3
    chosen = [one.state["compression/choice"].values.tolist() for one in (trainer, again)]
    assert chosen[0] == chosen[1] and 1 in chosen[0]


def test_code_that_a_checkpoint_alone_names_is_not_run(mirrored2, tmp_path, caplog):
    """A checkpoint from an untrusted source may name any code as the chosen method."""
    trainer = make(mirrored2)
    planted = {"sequential/dense/kernel": "a_stranger_s:Codec", "sequential/dense_1/kernel": "fp16"}
    plant = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(trainer.program.steps, "overrides", planted)
    )
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="3")
    trainer.fit(
        DATA, batch_size=16, steps=3, schedule=tfdist.Schedule(steps_per_call=3), checkpoints=saved, callbacks=[plant]
    )
    again = make(mirrored2)
    again.build(tfdist.data.ArraySource(DATA))
    assert again.resume(tmp_path) == 3
    assert (
        "Ignoring a_stranger_s:Codec, which the previous run chose, because --compression no longer contains it."
        in caplog.text
    )
    again.fit(DATA, batch_size=16, steps=4)
    assert again.program.steps.overrides == {"sequential/dense_1/kernel": "fp16"}


def test_one_s_own_code_that_auto_chose_goes_on(mirrored2):
    own = "tfdist.gradients.compression.methods.casts:FP16"
    trainer = make(mirrored2, f"auto(allow='{own}; int8')")
    trainer.build(tfdist.data.ArraySource(DATA))
    trainer.program.steps.restore_methods({"sequential/dense/kernel": own})
    assert trainer.program.steps.overrides == {"sequential/dense/kernel": own}


def test_auto_stays_with_none_unless_another_is_clearly_faster():
    link = Link(latency=0.0, bandwidth=1e3, replicas=2)
    plain = Cost(0.0, [RecordedCall("all_reduce", "a", (tf.float32,), ((250,),))])
    half = Cost(0.45, [RecordedCall("all_gather", "a", (tf.uint8,), ((500,),))])
    less = Cost(0.3, [RecordedCall("all_gather", "a", (tf.uint8,), ((500,),))])
    assert fastest_method(link, {"none": plain, "half": half}) == "none", "0.95 s of 1 s are no difference"
    assert fastest_method(link, {"none": plain, "half": less}) == "half"


def test_calls_of_groups_and_messages_cost_what_their_ranks_send():
    link = Link(latency=0.0, bandwidth=1.0, replicas=4)
    kinds = ((tf.float32,), ((250,),))
    pair = RecordedCall("all_reduce", "a", *kinds, (2, 3))
    assert link.sent_bytes([pair]) == 1000 and link.sent_bytes([RecordedCall("all_reduce", "a", *kinds)]) == 1500
    assert link.sent_bytes([RecordedCall("send", "a", *kinds, (2, 3))]) == 1000
    assert link.sent_bytes([RecordedCall("receive", "a", *kinds, (2, 3))]) == 0


def test_a_link_is_measured(mirrored2):
    link = measure(mirrored2)
    assert link.latency > 0
    assert link.bandwidth > 0
    assert link.replicas == 2


@pytest.mark.parametrize(
    ("exposed", "compresses", "expected"),
    [(0.01, False, None), (0.03, False, "30% of its time.*--compression=auto"), (0.05, True, "50%.*a stronger")],
)
def test_advice(exposed, compresses, expected):
    found = advice({"step_seconds": 0.1, "exposed_communication_seconds": exposed}, compresses)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(expected, found)
    assert advice({}, False) is None


def test_unsent_collectives_give_the_shapes_of_real_ones(mirrored4):
    def shapes(collectives):
        tensors = [tf.ones([4, 3]), tf.ones([8])]
        results = [
            *collectives.all_reduce(tensors, name="a"),
            *collectives.all_gather(tensors, name="b"),
            *collectives.all_gather([hide_row_count(tf.ones([collectives.rank, 3])), tensors[1]], name="rows"),
            *collectives.all_to_all(tensors, name="c"),
            *collectives.reduce_scatter(tensors, name="d"),
            *collectives.broadcast(tensors, name="e"),
        ]
        return [tf.shape(x) for x in results]

    found = [
        [
            mirrored4.local(x)[1].numpy().tolist()
            for x in tf.function(lambda c=c: mirrored4.run(lambda: shapes(c)), autograph=False)()
        ]
        for c in (mirrored4.collectives, NoCommunication(mirrored4.collectives))
    ]
    assert found[0] == found[1]
