"""Models and their data for tests of pipelines: each has something that a cut between stages might break."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers

import tfdist
from tfdist.layers import SyncBatchNormalization

EXAMPLES = 64
CLASSES, FEATURES, LENGTH, VOCABULARY = 3, 6, 6, 16
CUTS = {
    "skip": {2: "third", 3: "second,fourth", 4: "first,third,fourth"},
    "text": {2: "words"},
}  # by number of stages; others are automatic


@dataclasses.dataclass(frozen=True)
class Made:
    """A model, its data and the arguments of its trainer."""

    model: keras.Model
    x: Any
    y: Any
    weight: np.ndarray | None = None  # of rows, or of the steps of sequences
    options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"loss": _loss(), "metrics": ["accuracy"]})


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((EXAMPLES, *shape))


def _integers(end: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, end, (EXAMPLES, *shape)).astype("int32")


def regularized() -> Made:
    """Losses of weights and of activations in several stages."""
    inputs = x = keras.Input((FEATURES,))
    for i in range(4):
        of_activations = keras.regularizers.L2(0.1) if i % 2 else None
        x = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer=of_activations)(x)
    return Made(keras.Model(inputs, layers.Dense(CLASSES)(x)), _rows(FEATURES), _integers(CLASSES))


def frozen() -> Made:
    """A sequential model: convolutions with frozen BatchNorm; neither they nor what is behind them is sharded by `in`."""
    found = [keras.Input((6, 6, 1))]
    for _ in range(3):
        mean = keras.initializers.Constant(0.2)
        found.append(layers.BatchNormalization(trainable=False, moving_mean_initializer=mean))
        found.append(layers.Conv2D(3, 3, padding="same", activation="relu"))
    model = keras.Sequential([*found, layers.Flatten(), layers.Dense(CLASSES)])
    tfdist.name_dims(model, {".*conv2d.*/kernel": "* * * *", ".*dense.*/kernel": "* out"})
    return Made(model, _rows(6, 6, 1), _integers(CLASSES))


def tied() -> Made:
    """A transformer with the table of embeddings in its first and its last stage.

    Attention has no biases: the gradient of the keys' bias is a rounding error, which AdamW amplifies.
    """
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, 8, tie_weights=True, name="table")
    x = table(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4, use_bias=False)(y, y, use_causal_mask=True)])
        y = layers.Dense(16, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(8)(y)])
    tokens = _integers(VOCABULARY, LENGTH)
    return Made(keras.Model(inputs, table(layers.LayerNormalization()(x), reverse=True)), tokens, np.roll(tokens, 1, 1))


def skip() -> Made:
    """A skip connection from the first layer to the last, across all cuts."""
    inputs = keras.Input((FEATURES,))
    x = first = layers.Dense(8, "tanh", name="first")(inputs)
    for name in ("second", "third", "fourth"):
        x = layers.Dense(8, "tanh", name=name)(x)
    outputs = layers.Dense(CLASSES, name="last")(layers.Add(name="sum")([x, first]))
    return Made(keras.Model(inputs, outputs), _rows(FEATURES), _integers(CLASSES))


def masked() -> Made:
    """Padding whose mask crosses, and weights of tokens: micro-batches and replicas have different numbers of tokens."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    outputs = layers.Dense(CLASSES)(layers.Dense(8, "tanh")(x))
    lengths = 1 + _integers(LENGTH, 1)
    tokens = (1 + _integers(VOCABULARY - 1, LENGTH)) * (np.arange(LENGTH) < lengths)
    weight = np.random.default_rng(2).uniform(0, 2, (EXAMPLES, LENGTH))
    return Made(keras.Model(inputs, outputs), tokens.astype("int32"), _integers(CLASSES, LENGTH), weight)


def several() -> Made:
    """Several inputs, one of which a later stage reads, and weighted outputs, one of which an early stage computes."""
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((), dtype="int32", name="right")
    x = layers.Dense(8, "tanh", name="first")(left)
    early = layers.Dense(2, name="early")(x)
    x = layers.Dense(8, "tanh", name="second")(x)
    x = layers.Concatenate(name="both")([x, layers.Embedding(VOCABULARY, 4, name="table")(right)])
    x = layers.Dense(8, "tanh", name="third")(x)
    model = keras.Model([left, right], {"early": early, "late": layers.Dense(CLASSES, name="late")(x)})
    options = {
        "loss": {"early": keras.losses.MeanSquaredError(), "late": _loss()},
        "loss_weights": {"early": 0.3, "late": 2.0},
        "metrics": {"early": ["mae"], "late": ["accuracy"]},
    }
    targets = {"early": _rows(2), "late": _integers(CLASSES)}
    return Made(model, {"left": _rows(FEATURES), "right": _integers(VOCABULARY)}, targets, options=options)


class Root(layers.Layer):
    """The square root of scaled inputs; the gradient for a row of zeros is NaN."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return keras.ops.sqrt(x * self.scale)


class WithUnusedWeight(layers.Dense):
    """A dense layer with a weight that it does not use."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.unused = self.add_weight(shape=(4,), initializer="ones", name="unused")


def unused() -> Made:
    """A variable without a gradient in each stage, which no optimizer may change, not even by weight decay."""
    inputs = x = keras.Input((FEATURES,))
    for _ in range(4):
        x = WithUnusedWeight(8, "tanh")(x)
    return Made(keras.Model(inputs, layers.Dense(CLASSES)(x)), _rows(FEATURES), _integers(CLASSES))


def recurrent() -> Made:
    """Loops over time in several stages."""
    inputs = keras.Input((LENGTH, FEATURES))
    x = layers.LSTM(8, return_sequences=True, name="early")(inputs)
    x = layers.Dense(8, "tanh", name="between")(x)
    x = layers.GRU(8, name="late")(x)
    return Made(keras.Model(inputs, layers.Dense(CLASSES)(x)), _rows(LENGTH, FEATURES), _integers(CLASSES))


def text() -> Made:
    """A first stage without trainable variables, whose results have no static number of rows."""
    words = np.array(["a", "b", "c", "d"])
    vectorization = layers.TextVectorization(output_sequence_length=LENGTH, vocabulary=words, name="words")
    model = keras.Sequential([keras.Input((), dtype="string"), vectorization, layers.Embedding(6, 8), layers.Flatten()])
    model.add(layers.Dense(CLASSES))
    return Made(model, np.array([" ".join(words[row]) for row in _integers(4, LENGTH)]), _integers(CLASSES))


def looked_up() -> Made:
    """Inputs with a number of rows that is not that of a micro-batch, and of which no others are known."""
    inputs = keras.Input((1,), dtype="string", batch_size=16)
    x = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)(inputs)
    x = layers.Dense(8, "tanh", name="first")(layers.Flatten()(layers.Embedding(2, 4)(x)))
    words = np.array(["a", "b"])[_integers(2, 1)]
    return Made(keras.Model(inputs, layers.Dense(CLASSES, name="last")(x)), words, _integers(CLASSES))


def overflowing() -> Made:
    """A row for which only a gradient of the first stage is not finite."""
    inputs = keras.Input((FEATURES,))
    x = Root(name="root")(inputs)
    for i in range(4):
        x = layers.Dense(8, "tanh", name=f"dense_{i}")(x)
    rows = np.abs(_rows(FEATURES))
    rows[EXAMPLES - 1] = 0.0
    return Made(keras.Model(inputs, layers.Dense(CLASSES, name="last")(x)), rows, _integers(CLASSES))


def dropped() -> Made:
    """Dropout in each stage."""
    inputs = x = keras.Input((FEATURES,))
    for _ in range(4):
        x = layers.Dropout(0.3)(layers.Dense(8, "tanh")(x))
    return Made(keras.Model(inputs, layers.Dense(CLASSES)(x)), _rows(FEATURES), _integers(CLASSES))


class Exposing(layers.Layer):
    """Adds a dropped-out row of its weights for each example: the gradient of the row is the mask of the example."""

    def build(self, *_: Any) -> None:
        self.dropout = layers.Dropout(0.5)
        self.rows = self.add_weight(shape=(EXAMPLES, 32), initializer="ones", name="rows")

    def call(self, x: Any, example: Any, training: bool | None = None) -> Any:
        return x + self.dropout(keras.ops.take(self.rows, example, axis=0), training=training)


def exposing() -> Made:
    """Four layers whose weights show which elements were dropped, after one step."""
    example, zeros = keras.Input((), dtype="int32", name="example"), keras.Input((32,), name="zeros")
    x = zeros
    for i in range(4):
        x = Exposing(name=f"layer_{i}")(x, example)
    options = {"loss": lambda y, p: keras.ops.mean(p, axis=-1)}
    none = np.zeros((EXAMPLES, 32))
    data = {"example": np.arange(EXAMPLES), "zeros": none}
    return Made(keras.Model([example, zeros], x), data, none, options=options)


class InGroups(layers.BatchNormalization):
    """Normalizes the micro-batches of a pipeline on one device, each over all replicas and one after the other."""

    def __init__(self, replicas: int, micro_batches: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.groups = (replicas, micro_batches)

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training:
            return super().call(x, training=False)
        split = keras.ops.reshape(x, (*self.groups, -1, *x.shape[1:]))
        found = [super(InGroups, self).call(_merged(split[:, m]), training=True) for m in range(self.groups[1])]
        parts = [keras.ops.reshape(part, keras.ops.shape(split[:, 0])) for part in found]
        return keras.ops.reshape(keras.ops.stack(parts, axis=1), keras.ops.shape(x))


def _merged(x: Any) -> Any:
    return keras.ops.reshape(x, (-1, *x.shape[2:]))


def normalized(replicas: int = 1, micro_batches: int = 1) -> Made:
    """BatchNorm over the rows that a micro-batch has in all replicas."""
    inputs = x = keras.Input((FEATURES,))
    in_groups = {"replicas": replicas, "micro_batches": micro_batches}
    for i in range(4):
        is_one = tfdist.current_strategy().name == "single"
        norm = InGroups(**in_groups, name=f"norm_{i}") if is_one else SyncBatchNormalization(name=f"norm_{i}")
        x = layers.Activation("tanh")(norm(layers.Dense(8, use_bias=False)(x)))
    return Made(keras.Model(inputs, layers.Dense(CLASSES)(x)), 1.0 + _rows(FEATURES), _integers(CLASSES))


TRAINED = (regularized, frozen, tied, skip, masked, several, text, looked_up, normalized, unused, recurrent)
MODELS: Mapping[str, Callable[..., Made]] = {make.__name__: make for make in (*TRAINED, overflowing, dropped, exposing)}
