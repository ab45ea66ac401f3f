import keras
import pytest

from tfdist import keras_internals, models
from tfdist.distribution.variable_layouts import dims_of, name_dims
from tfdist.errors import InputError


def named(make):
    """Returns the names of the dims of a model's variables, as known when they are created."""
    abstract_model = []
    with keras_internals.deferred_creation(abstract_model, abstract_model.append):
        model = make()
    found = {
        uninitialized.variable.path: dims_of(uninitialized.variable, uninitialized.owners)
        for uninitialized in abstract_model
    }
    assert {variable.path for variable in model.variables} <= set(found)
    return found


def small():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="last")(hidden))


def test_types_of_layers_name_dims():
    def make():
        tokens = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(7, 8, name="table")(tokens)
        x = keras.layers.LayerNormalization(name="norm")(x)
        x = keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x)
        x = keras.layers.Conv1D(5, 3, name="conv")(x)
        x = keras.layers.BatchNormalization(name="moments")(x)
        return keras.Model(tokens, keras.layers.Dense(2, name="dense")(x))

    found = named(make)
    assert found["table/embeddings"] == ("vocab", "embed")
    assert found["norm/gamma"] == ("embed",)
    for part in ("query", "key", "value"):
        assert found[f"attention/{part}/kernel"] == ("embed", "heads", "head_dim")
        assert found[f"attention/{part}/bias"] == ("heads", "head_dim")
    assert found["attention/attention_output/kernel"] == ("heads", "head_dim", "embed")
    assert found["attention/attention_output/bias"] == ("embed",)
    assert found["conv/kernel"] == ("spatial_0", "in", "out")
    assert found["moments/moving_mean"] == ("embed",)
    assert found["dense/kernel"] == ("in", "out")
    assert found["dense/bias"] == ("out",)


class Gained(keras.layers.Conv1D):
    """A convolution with an additional weight."""

    def build(self, shape):
        super().build(shape)
        self.gain = self.add_weight(shape=(5, 5), name="gain")


def test_a_weight_that_a_type_does_not_have_has_no_names():
    found = named(lambda: keras.Sequential([keras.Input((6, 8)), Gained(5, 3, name="conv")]))
    assert next(dims for path, dims in found.items() if path.endswith("conv/gain")) == (None, None)


def test_a_table_goes_before_types():
    found = named(lambda: name_dims(small(), {"first/kernel": "in ffn", "last/kernel": "ffn *"}))
    assert found["first/kernel"] == ("in", "ffn")
    assert found["last/kernel"] == ("ffn", None)
    assert found["last/bias"] == ("out",)


def test_the_transformer_ships_with_its_table():
    found = named(lambda: models.build("transformer(layers=2, width=8, heads=2)", (6,), 11))
    assert found["block_1_ffn_in/kernel"] == ("embed", "ffn")
    assert found["block_0_ffn_out/kernel"] == ("ffn", "embed")
    assert found["block_0_attention/query/kernel"] == ("embed", "heads", "head_dim")
    assert found["token_embedding/embeddings"] == ("vocab", "embed")
    assert found["position_embedding/embeddings"] == (None, "embed")
    assert found["logits/kernel"] == ("embed", "vocab")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"first/(kernel": "a b"}, "'first/.kernel' is not a regular expression"),
        ({"first/kernel": "a b c"}, "names 3 dims of first/kernel, which has 2. Received: 'a b c'"),
        ({".*/kernel": "a b", "first/.*l": "a c"}, "'.*/kernel' and 'first/.*l' disagree about first/kernel"),
    ],
)
def test_refuses(table, message):
    with pytest.raises(InputError) as raised:
        name_dims(small(), table)
    assert message.replace("'first/.kernel'", "'first/(kernel'") in str(raised.value)
