import keras
import pytest

import tfdist
from tests import documented_json
from tfdist import keras_internals, verify
from tfdist.cli.output import Output
from tfdist.config.train_config import VerifyConfig

pytestmark = pytest.mark.usefixtures("precision")
GIVEN = {"strategy": "mirrored", "devices": 2, "model": "mlp(hidden=(8,))", "batch_size": 13, "steps": 3}
IN_16_BITS = {"precision": "mixed_bfloat16", "batch_size": 24, "steps": 4}
ATTENTION = {"model": "tests.verify_test:attending", "optimizer": "adamw", "accumulate_steps": 3, "clip_norm": 1.0}


def verified(capsys, **given):
    code = verify.main(VerifyConfig(**GIVEN | given))
    return code, capsys.readouterr().out


@pytest.mark.smoke("verify", "single", "mirrored")
def test_a_strategy_gives_the_result_of_one_device(capsys):
    """Nothing is shown but the comparison."""
    assert verify.main(VerifyConfig(**GIVEN)) == 0
    shown = capsys.readouterr()
    assert "exceeds the tolerance" not in shown.out
    assert not [line for line in (shown.out + shown.err).splitlines() if line.startswith("step ")]


class _Both(Output):
    """Prints the text although the result is wanted as JSON."""

    def line(self, text=""):
        print(text)


def test_json_says_what_the_text_says(capsys):
    output = _Both(is_json=True)
    given = GIVEN | {"tolerance": 1e-12}
    assert verify.main(VerifyConfig(**given), output) == 1
    text = capsys.readouterr().out
    record = {"schema": 1, "command": "verify", **output.json_result}
    documented_json.check("verify", record)
    assert record["reason"] in text and record["processes"] == 1 and record["replicas"] == 2
    rows = [line.split()[:3] for line in text.splitlines() if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert rows == [[str(s["step"]), f"{s['loss']:.8g}", f"{s['reference_loss']:.8g}"] for s in record["steps"]]
    assert record["largest_difference"] == max(step["largest_difference"] for step in record["steps"])
    assert (
        f"NOT EQUAL: the largest difference is {record['largest_difference']:.2e} relative; the tolerance 1e-12" in text
    )
    assert not record["equal"] and record["replicas_equal"] and "Replicas are equal bit for bit." in text


@pytest.mark.parametrize("given", [{}, IN_16_BITS], ids=["float32", "bfloat16"])
def test_a_sum_too_many_is_found_at_the_first_step(given, capsys, monkeypatch):
    monkeypatch.setattr(keras_internals, "disable_gradient_aggregation", lambda optimizer: None)
    code, out = verified(capsys, **given, optimizer="sgd(learning_rate=0.1)")
    assert code == 1
    [first] = [line for line in out.splitlines() if line.split()[:1] == ["1"]]
    assert "exceeds the tolerance" in first


def test_a_mesh_gives_the_result_of_one_device(capsys):
    layout = {"mesh_shape": "data:2;model:2", "layout": "in:model", "shard": "parameters", "shard_min_elements": 1}
    code, out = verified(capsys, strategy="mesh", devices=0, batch_size=12, optimizer="adamw", **layout)
    assert code == 0
    assert "exceeds the tolerance" not in out


def test_looking_for_noise_is_no_step_of_the_reference(capsys):
    """Moving averages would differ by half after an additional update."""
    code, out = verified(capsys, strategy="single", devices=0, model="cnn(filters=(4,))", steps=2)
    assert code == 0, out


def test_compression_is_held_against_one_device_without_it():
    """What it loses exceeds a small tolerance, but would not exceed one of 1.0."""
    lossy = {"compression": "int8(bits=2)", "compression_min_bytes": 0, "tolerance": 1e-7}
    found = documented_json.printed("verify", verify.main, VerifyConfig(**GIVEN | lossy), code=1)
    assert found["replicas_equal"] and 1e-7 < found["largest_difference"] < 1.0


class Registered(keras.Loss):
    def call(self, y_true, y_pred):
        return tfdist.row_semantics.register(rows_to="mean")(keras.ops.sum)(y_pred)


def test_a_function_is_what_it_is_registered_as():
    with pytest.raises(tfdist.errors.InputError, match='sum, rows_to="mean", .* for 13 rows, but .* for 5 and 8 of'):
        verify.main(VerifyConfig(**GIVEN | {"loss": "tests.verify_test:Registered", "metrics": ""}))


def test_bfloat16_is_held_against_its_own_rounding(capsys):
    """The gradients of the keys' biases are rounding errors, which AdamW scales to full steps: they differ by their size."""
    code, out = verified(capsys, **IN_16_BITS, **ATTENTION)
    assert code == 0, out
    assert "roundings" in out


@pytest.mark.full
def test_a_tolerance_that_is_given_is_relative_in_bfloat16_too(capsys):
    assert verified(capsys, **IN_16_BITS, **ATTENTION, tolerance=0.1)[0] == 1


def attending(input_shape, classes):
    """Returns a model with attention over the rows of an image of a digit."""
    inputs = keras.Input(input_shape)
    rows = keras.layers.Reshape((8, 8))(inputs)
    attended = keras.layers.MultiHeadAttention(2, 8)(rows, rows)
    features = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(rows + attended))
    return keras.Model(inputs, keras.layers.Dense(classes, dtype="float32")(features))
