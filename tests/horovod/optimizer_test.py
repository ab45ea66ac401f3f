"""The distributed optimizer on two real ranks in float64, compared with plain Keras with global batches in this process."""

import json
import pathlib
import runpy
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.horovod.jobs import Outcomes, results

pytestmark = pytest.mark.processes

pytest.importorskip("horovod")
WORKER = pathlib.Path(__file__).with_name("optimizer_worker.py")
N = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The results of each rank."""
    return results([str(WORKER), str(tmp_path_factory.mktemp("saved"))], N)


@pytest.fixture
def worker(float64: None) -> dict[str, Any]:
    """The worker's models and data."""
    return runpy.run_path(str(WORKER), run_name="worker")


def same(ranks: Outcomes, key: str) -> np.ndarray:
    """Returns a value that must be bitwise equal on all ranks."""
    assert len({json.dumps(rank[key]) for rank in ranks}) == 1, f"{key} differs between ranks"
    return np.array(ranks[0][key])


def near(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert difference < tolerance, difference


def alone(worker, model, optimizer, x=None, steps=4) -> np.ndarray:
    """Returns the weights of plain Keras after `steps` steps with the global batch."""
    model.compile(optimizer, "mse", jit_compile=False)
    x = worker["X"] if x is None else x
    model.fit(x, worker["Y"], batch_size=len(x), epochs=steps, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def test_slices_travel_as_rows_or_dense(ranks, worker):
    expected = alone(worker, worker["embedding_model"](), keras.optimizers.SGD(0.1), worker["IDS"])
    near(same(ranks, "sparse"), expected)
    near(same(ranks, "sparse as dense"), expected)


def test_batch_normalisation_over_all_ranks_is_that_of_the_whole_batch(ranks, worker):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    near(
        same(ranks, "normalised"),
        alone(worker, keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.SGD(0.1)),
    )


def test_several_steps_a_call(ranks, worker):
    near(same(ranks, "two steps a call"), alone(worker, worker["model_of"](), keras.optimizers.SGD(0.1)))


@pytest.mark.parametrize(("name", "rate"), [("SGD", 0.1), ("Adam", 0.01)])
def test_several_backward_passes_are_one_batch(ranks, worker, name, rate):
    optimizer = getattr(keras.optimizers, name)(rate)
    near(same(ranks, f"2 passes of {name}"), alone(worker, worker["model_of"](), optimizer))
    assert [rank[f"2 passes of {name}, updates"] for rank in ranks] == [4] * N


def test_several_backward_passes_of_slices_or_without_some_gradients(ranks, worker):
    """Without some, the ranks' mean is 1.5 times the first rank's sum, in each of two steps."""
    for where in ("eager", "graph"):
        assert same(ranks, f"passes without some gradients, {where}").tolist() == [-3.0, -6.0, -36.0]
    assert "had its first gradient after this tf.function was traced" in ranks[0]["a gradient after tracing"]
    expected = alone(worker, worker["embedding_model"](), keras.optimizers.SGD(0.1), worker["IDS"])
    near(same(ranks, "2 sparse passes"), expected)


def test_a_nan_does_not_stay(ranks):
    """The first step is NaN on both ranks; the second gives 1 - ((1 + 2) + (1 + 1)) / 2."""
    for rank in ranks:
        assert rank["after a NaN"][0] == 1.0
        assert np.isnan(rank["after a NaN"][1])
        assert rank["after a NaN"][2:] == [1.0, -1.5]


@pytest.mark.parametrize(("method", "tolerance"), [("fp16", 1e-2), ("text", 2e-2), ("powersgd", 0.5), ("topk", 0.6)])
def test_compression_whatever_the_ranks_names_are(ranks, worker, method, tolerance):
    keras.utils.set_random_seed(5)
    wide = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3000), keras.layers.Dense(2)])
    before = np.concatenate([np.ravel(weight) for weight in wide.get_weights()])
    exact = alone(worker, wide, keras.optimizers.SGD(0.001)) - before
    found = same(ranks, f"compression {method}")
    difference = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-9 < difference < tolerance, "lossy, and not by much"


def test_what_compression_remembers_stays_finite(ranks):
    assert [rank["finite after topk"] for rank in ranks] == [[True, False, True]] * N


@pytest.mark.parametrize("way", ["outside", "inside"])
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, way):
    """The mean gradient is 6: 1.5 at a scale of 4, and 3 at one of 2."""
    assert same(ranks, f"loss scale {way}").tolist() == [[-1.5, 4.0], [-1.5, 2.0], [-4.5, 2.0]]


def test_ranks_outside_a_set_and_those_that_have_joined_are_not_waited_for(ranks):
    """A rank that has joined sends zeros: the mean of rank 0's gradient, 2, is 1, and 0.5 at a loss scale of 2."""
    for way in ("outside", "inside"):
        assert [rank[f"loss scale {way}, joined"] for rank in ranks] == [[-0.5, 2.0], [0.0, 2.0]]
    assert ranks[0]["first step after another rank has joined"] == -1.0
    assert ranks[0]["loss scale of a set"] == -1.0


def test_own_steps_communicate_where_xla_is_asked_for(ranks, worker):
    near(same(ranks, "own steps"), alone(worker, worker["model_of"](), keras.optimizers.SGD(0.1)))
    near(same(ranks, "sum of targets"), worker["Y"].sum())


def test_a_deep_copy_reduces_gradients_too(ranks):
    """The mean gradient is 1.5; the third step's velocity is 1.5 + 0.5 * 1.5."""
    assert same(ranks, "copies").tolist() == [-1.5, -3.0, -5.25]


def test_mixed_precision_trains_alike(ranks):
    assert {json.dumps(rank["mixed precision"]) for rank in ranks} == {json.dumps(ranks[0]["mixed precision"])}
    assert ranks[0]["mixed precision"][0] == "LossScaleOptimizer"


def test_a_saved_model_loads_with_and_without_tfdist(ranks, worker):
    assert [rank["plain"] for rank in ranks] == [[True, True]] * N
    assert all(rank["an instance of"] for rank in ranks)
    near(same(ranks, "saved and loaded"), alone(worker, worker["model_of"](), keras.optimizers.SGD(0.05, momentum=0.9)))


def test_local_layers(ranks, worker):
    """Gradients of local layers are local, divided by the number of ranks; the others are means over ranks."""
    assert ranks[0]["local gradients"] == [
        ["model/hidden/kernel", "model/hidden/bias"],
        ["model/last/kernel", "model/last/bias"],
    ]
    wholes = []
    for rank, outcome in enumerate(ranks):
        model, rows = worker["model_of"](), slice(rank, None, N)
        before = model.get_layer("hidden").get_weights()[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(worker["X"][rows]) - worker["Y"][rows]))
        hidden, _, last, _ = tape.gradient(loss, model.trainable_variables)
        assert outcome["hidden gradient"] == pytest.approx(float(tf.reduce_sum(hidden)) / N)
        near(np.array(outcome["partial"][0]), before - 0.1 * hidden.numpy() / N)
        wholes.append(last.numpy())
    expected = worker["model_of"]().get_layer("last").get_weights()[0] - 0.1 * np.mean(wholes, axis=0)
    for outcome in ranks:
        near(np.array(outcome["partial"][1]), expected)


def test_tapes(ranks, worker):
    model = worker["model_of"]()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(worker["X"]))
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    near(same(ranks, "tape"), np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
    near(same(ranks, "tape of the rest"), alone(worker, worker["model_of"](), keras.optimizers.SGD(0.1)))


def test_tapes_of_other_operations(ranks):
    """Adasum of (0, 4) and (6, 8), whose product is 32, is (1 - 32 / 32) (0, 4) + (1 - 32 / 200) (6, 8)."""
    assert same(ranks, "maximum").tolist() == [2.0 + 2.0**-12]
    assert same(ranks, "maximum as fp16").tolist() == [2.0], "the digits below float16's are not sent"
    np.testing.assert_allclose(same(ranks, "adasum"), [5.04, 6.72], rtol=1e-6)


@pytest.mark.parametrize(("name", "factor"), [("mean", 1.5), ("sum", 3.0), ("divided", 1.5)])
def test_sources_of_unknown_rows(ranks, name, factor):
    dense, gathered = ranks[0][f"unknown rows, {name}"]
    assert ranks[0][f"unknown rows, {name}"] == ranks[1][f"unknown rows, {name}"]
    assert dense == [[2.0 * factor] * 2] * 3
    assert gathered == [[factor] * 2, [0.0] * 2, [0.0] * 2]


def test_callbacks(ranks, worker):
    """Momentum correction: when the learning rate is halved, so is the velocity."""
    keras.utils.set_random_seed(20)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    losses = []
    momentum = float(np.float32(0.9))  # as Keras computes with it
    velocity = [np.zeros(v.shape) for v in model.trainable_variables]
    for rate, factor in ((0.1, 1.0), (0.05, 0.5), (0.05, 1.0)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(worker["X"]) - worker["Y"]))
        gradients = tape.gradient(loss, model.trainable_variables)
        velocity = [momentum * factor * v - rate * g.numpy() for v, g in zip(velocity, gradients, strict=True)]
        model.set_weights([w + v for w, v in zip(model.get_weights(), velocity, strict=True)])
        losses.append(float(loss))
    found, rates, history = ranks[0]["schedule"]
    assert len({json.dumps(rank["schedule"]) for rank in ranks}) == 1
    near(np.array(found), np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.05])
    np.testing.assert_allclose(history, losses)
    assert ranks[0]["seed"] != ranks[1]["seed"], "random layers of ranks draw alike"


def test_an_elastic_state_goes_on_where_it_was_kept(ranks):
    results = [rank["elastic"] for rank in ranks]
    assert len({json.dumps(result) for result in results}) == 1
    done, attempts, epoch, batch, final = results[0]
    assert done == "done"
    assert [attempt[0] for attempt in attempts] == [0, 1], "rank 0's epoch, then the one that was committed"
    assert np.any(np.array(attempts[1][1]))
    assert attempts[0][1] != attempts[1][1] != final
    assert (epoch, batch) == (2, 0)


def test_a_new_rank_of_an_elastic_job_reduces_as_the_others_do(ranks):
    assert ranks[0]["kept of its own"][0] > 0
    assert [rank["kept of its own"][1] for rank in ranks] == [0.0] * N
    assert [rank["passes not applied"] for rank in ranks] == [0] * N
    assert len(same(ranks, "elastic weights"))
    assert ranks[0]["elastic shared"]
    same(ranks, "elastic shared")
    assert ranks[0]["elastic seeds"] != ranks[1]["elastic seeds"], "random layers of ranks draw alike"


def test_errors_are_one_line(ranks):
    starts = [
        "The optimizer must not be distributed yet.",
        "The optimizer must not be distributed yet.",
        "The optimizer must be a Keras 3 optimizer. Received: str.",
        "DistributedOptimizer takes op=Average or Sum. Received: Max.",
        "backward_passes_per_step must be an integer of at least 1. Received: 0.",
        "gradient_predivide_factor is for op=Average. Received: op=Sum.",
        "A single operation takes Compression.none or .fp16. Received: powersgd(rank=2).",
        "TensorFlow 2 has no global variables.",
        "op=hvd.Max takes Compression.none or .fp16. Received: powersgd(rank=2).",
    ]
    for rank in ranks:
        for message, start in zip(rank["errors"], starts, strict=True):
            assert message.startswith(start), message
            assert "\n" not in message


def test_different_models_are_named_on_every_rank(ranks):
    for rank in ranks:
        assert rank["different models"] == (
            'The gradient model/hidden/kernel differs: rank 0 has "float64[6, 8]", rank 1 has "float64[6, 9]". '
            "It must be the same on every process."
        )
        assert rank["other order"].startswith('The gradient number 0 differs: rank 0 has "first", rank 1 has "second".')
