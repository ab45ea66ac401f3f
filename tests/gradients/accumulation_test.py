"""Micro-steps affect memory and time, not the result: M of them give the same weights as one, without messages between."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick
from tfdist import testing
from tfdist.collectives import RecordingCollectives
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import accumulate_gradients

CASES = [
    testing.Case(model="mlp", optimizer="sgd", batch_size=13, steps=6),
    testing.Case(model="masked", optimizer="sgd", batch_size=13, steps=6),
    testing.Case(model="regularized", optimizer="sgd", weighted=True, steps=6),
    testing.Case(model="transformer", optimizer="adamw", steps=6),
]


@pytest.mark.parametrize("micro_steps", [pytest.param(2, marks=pytest.mark.full), 5])
@pytest.mark.parametrize("case", quick(CASES, *CASES[:3]), ids=str)
def test_the_same_result_in_one_go_and_in_parts(case, micro_steps, single, mirrored2, float64):
    expected = testing.run_case(single, case)
    outcome = testing.run_case(mirrored2, case, accumulate_steps=micro_steps)
    assert len(set(outcome.digests)) == 1
    for path, a in expected.variables.items():
        assert np.max(np.abs(a - outcome.variables[path])) <= 1e-9 * max(1.0, np.max(np.abs(a))), path
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize("model", ["mlp", "masked"])
def test_nothing_is_sent_between_micro_steps(model, mirrored2, monkeypatch):
    """Four micro-steps send as many messages as one: the count of unmasked elements, then the sums."""
    case, sent = testing.Case(model=model, optimizer="sgd", steps=1), []
    for micro_steps in (1, 4):
        recording = RecordingCollectives(mirrored2.collectives)
        with monkeypatch.context() as patch:
            patch.setattr(mirrored2, "collectives", recording)
            testing.run_case(mirrored2, case, accumulate_steps=micro_steps)
        sent.append([(c.operation, c.payload_bytes) for c in recording.calls if c.name.startswith(("grad", "loss"))])
    assert sent[0] == sent[1]
    assert len(sent[0]) == 2 * (1 if model == "mlp" else 2), "for each of the two replicas that are traced"


@pytest.mark.parametrize("row", [0, 3, 7])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_inf_or_a_nan_in_any_part_is_seen(single, row, value):
    x = np.ones((8, 3), "float32")
    x[row, 1] = value
    with single.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", accumulate_steps=4)
    before = model.get_weights()
    with pytest.raises(NotFiniteError, match="at step 0"):
        trainer.fit((x, np.zeros((8, 2), "float32")), batch_size=8, steps=1)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts_are_as_equal_as_they_can_be():
    sizes = []

    def differentiate(rows):
        sizes.append(rows.shape[0])
        return [tf.cast(tf.shape(rows)[0], tf.float32)[None] ** 2], tf.reduce_sum(rows)

    spec = [tf.TensorSpec([1], tf.float32)]
    [squares], total = accumulate_gradients(differentiate, tf.range(7.0), 3, spec, tf.float32)
    assert float(squares[0]) == 2**2 + 2**2 + 3**2
    assert float(total) == 21
    compiled = tf.function(lambda rows: accumulate_gradients(differentiate, rows, 3, spec, tf.float32), autograph=False)
    sizes.clear()
    compiled(tf.range(6.0))
    assert set(sizes) == {2}, "static where the parts are equal"


def test_what_cannot_be_split_is_refused(single):
    data = (np.zeros((8, 4, 4, 1), "float32"), np.zeros((8, 1), "float32"))
    for layers, micro_steps, message in (
        ([tfdist.layers.SyncBatchNormalization()], 2, "Use batch_norm=local or accumulate_steps=1"),
        ([], 5, "batch_size"),
    ):
        with single.scope():
            hidden = [*layers, keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4, 4, 1)), *hidden])
            trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", accumulate_steps=micro_steps)
        with pytest.raises(InputError, match=message):
            trainer.fit(data, batch_size=4, steps=1)
