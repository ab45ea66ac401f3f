"""What each loss, metric, layer, activation, regularizer and optimizer that Keras exports needs of the rows of a batch.

python docs/generate/keras_parts.py [KIND...]    # prints each part and, without KIND, writes the table of the page

The smallest model that uses a part is given to Keras's fit, which labels its step and, if values need all rows, partitions it,
as in `tfdist explain`. `tests/row_semantics/keras_test.py` compares the results with the page.
"""

import collections
import contextlib
import inspect
import itertools
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.errors import InputError
from tfdist.row_semantics.explanation import Explanation, using_listener

sys.path.append(str(pathlib.Path(__file__).parent))
from steps_of_programs import VERDICTS, Finding

layers = keras.layers
PAGE = pathlib.Path(__file__).parents[1] / "concepts" / "row_semantics.md"
BEGIN, END = "<!-- parts of Keras: written by docs/generate/keras_parts.py -->\n", "<!-- end of parts -->\n"
KINDS = ("losses", "metrics", "layers", "activations", "regularizers", "optimizers")
_ROWS = 4

# Arguments of the constructors, if any are needed.
_ARGUMENTS: dict[str, Any] = {
    "FBetaScore": {"beta": 0.5},
    "IoU": {"num_classes": 5, "target_class_ids": [0, 1]},
    "LossScaleOptimizer": {"inner_optimizer": keras.optimizers.SGD()},
    "MeanIoU": {"num_classes": 5},
    "MeanMetricWrapper": {"fn": lambda y, x: keras.losses.mean_squared_error(y, x)},
    "MultiOptimizer": {"optimizer_map": lambda variable: keras.optimizers.Adam()},
    "OneHotIoU": {"num_classes": 5, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": 5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 3},
}
# Losses and metrics whose labels are classes, one for each row.
CLASSES = re.compile("Sparse|Circle|CategoricalGeneralized")


class Inputs(NamedTuple):
    """An input of a model: the shape of a row, its dtype, and for integers the number of classes."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def data(self) -> np.ndarray:
        """Returns rows."""
        generator, shape = np.random.default_rng(0), (_ROWS, *self.shape)
        if self.dtype == "string":
            return tf.fill(shape, "a")
        return generator.integers(0, 2, shape) if self.dtype == "int32" else generator.random(shape, np.float32)


_TEXT, _NUMBERS = Inputs((1,), "string"), Inputs((3,), "int32")
_SEQUENCE, _IMAGE = Inputs((5, 4)), Inputs((8, 8, 3))
_BY_RANK = {"1D": Inputs((8, 4)), "2D": _IMAGE, "3D": Inputs((4, 4, 4, 2))}
_IMAGES = re.compile(
    "Random|RandAugment|AugMix|AutoContrast|CenterCrop|ContrastLimited|CutMix|Equalization|MixUp|Resizing|Solarization"
)


def _with_boxes(kind: type, images: Any, boxes: Any, labels: Any) -> Any:
    given = {"images": images, "bounding_boxes": {"boxes": boxes, "labels": labels}}
    return kind(2, bounding_box_format="xyxy")(given)["bounding_boxes"]["boxes"]


_MERGED = ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
# How a layer is made and used, if its class has required arguments or does not get one tensor of floating-point numbers.
_LAYERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    **{name: ([Inputs((4,))] * 2, lambda kind, a, b: kind()([a, b])) for name in _MERGED},
    "Activation": (Inputs((4,)), lambda kind, x: kind("relu")(x)),
    "AdditiveAttention": (_SEQUENCE, lambda kind, x: kind()([x, x])),
    "Attention": (_SEQUENCE, lambda kind, x: kind()([x, x])),
    "Bidirectional": (_SEQUENCE, lambda kind, x: kind(layers.LSTM(3))(x)),
    "CategoryEncoding": (_NUMBERS, lambda kind, x: kind(num_tokens=4)(x)),
    "Discretization": (Inputs((4,)), lambda kind, x: kind(bin_boundaries=[0.2, 0.6])(x)),
    "Dot": ([_SEQUENCE] * 2, lambda kind, a, b: kind(axes=(2, 2))([a, b])),
    "EinsumDense": (_SEQUENCE, lambda kind, x: kind("abc,cd->abd", output_shape=(5, 3))(x)),
    "Embedding": (_NUMBERS, lambda kind, x: kind(4, 3, mask_zero=True)(x)),
    "Equalization": (_IMAGE, lambda kind, x: layers.Pipeline([kind()])(x)),
    "GRU": (_SEQUENCE, lambda kind, x: kind(3)(x)),
    "GRUCell": (_SEQUENCE, lambda kind, x: layers.RNN(kind(3))(x)),
    "GroupQueryAttention": (_SEQUENCE, lambda kind, x: kind(4, 2, 1)(x, x)),
    "GroupNormalization": (Inputs((4,)), lambda kind, x: kind(groups=2)(x)),
    "HashedCrossing": ([Inputs((1,), "string")] * 2, lambda kind, a, b: kind(num_bins=4)((a, b))),
    "Hashing": (_TEXT, lambda kind, x: kind(num_bins=4)(x)),
    "InputLayer": (Inputs((4,)), lambda kind, x: keras.Sequential([kind(shape=(4,)), layers.Dense(2)])(x)),
    "IntegerLookup": (_NUMBERS, lambda kind, x: kind(vocabulary=[1, 2])(x)),
    "LSTM": (_SEQUENCE, lambda kind, x: kind(3)(x)),
    "LSTMCell": (_SEQUENCE, lambda kind, x: layers.RNN(kind(3))(x)),
    "Lambda": (Inputs((4,)), lambda kind, x: kind(lambda x: x * x)(x)),
    "Masking": (_SEQUENCE, lambda kind, x: layers.LSTM(3)(kind()(x))),
    "MaxNumBoundingBoxes": ([_IMAGE, Inputs((3, 4)), Inputs((3,))], _with_boxes),
    "MelSpectrogram": (Inputs((512,)), lambda kind, x: kind(fft_length=128, sequence_stride=64, num_mel_bins=8)(x)),
    "MultiHeadAttention": (_SEQUENCE, lambda kind, x: kind(2, 4)(x, x)),
    "Normalization": (Inputs((4,)), lambda kind, x: kind(mean=0.5, variance=2.0)(x)),
    "PReLU": (_SEQUENCE, lambda kind, x: kind()(x)),
    "Permute": (_SEQUENCE, lambda kind, x: kind((2, 1))(x)),
    "Pipeline": (Inputs((4,)), lambda kind, x: kind([layers.Rescaling(2.0), layers.ReLU()])(x)),
    "RNN": (_SEQUENCE, lambda kind, x: kind(layers.SimpleRNNCell(3))(x)),
    "RandomCrop": (_IMAGE, lambda kind, x: kind(8, 8)(x)),
    "RandomPosterization": (_IMAGE, lambda kind, x: kind(4)(x)),
    "RandomTranslation": (_IMAGE, lambda kind, x: kind(0.2, 0.2)(x)),
    "RepeatVector": (Inputs((4,)), lambda kind, x: kind(2)(x)),
    "Rescaling": (Inputs((4,)), lambda kind, x: kind(2.0)(x)),
    "Reshape": (Inputs((4,)), lambda kind, x: kind((2, 2))(x)),
    "ReversibleEmbedding": (_NUMBERS, lambda kind, x: (lambda layer: layer(layer(x), reverse=True))(kind(4, 3))),
    "STFTSpectrogram": (Inputs((512, 1)), lambda kind, x: kind(frame_length=128, frame_step=64, fft_length=128)(x)),
    "SimpleRNN": (_SEQUENCE, lambda kind, x: kind(3)(x)),
    "SimpleRNNCell": (_SEQUENCE, lambda kind, x: layers.RNN(kind(3))(x)),
    "SpectralNormalization": (Inputs((4,)), lambda kind, x: kind(layers.Dense(3))(x)),
    "StackedRNNCells": (_SEQUENCE, lambda kind, x: layers.RNN(kind([layers.GRUCell(3), layers.LSTMCell(3)]))(x)),
    "StringLookup": (_TEXT, lambda kind, x: kind(vocabulary=["a", "b"])(x)),
    "TFSMLayer": (Inputs((4,)), lambda kind, x: kind(_exported())(x)),
    "TextVectorization": (_TEXT, lambda kind, x: kind(vocabulary=["a", "b"], output_sequence_length=4)(x)),
    "TimeDistributed": (_SEQUENCE, lambda kind, x: kind(layers.Dense(3))(x)),
}
# Values of required arguments of other layers, by their names.
_REQUIRED = {
    "filters": 3,
    "kernel_size": 2,
    "pool_size": 2,
    "output_size": 2,
    "rate": 0.2,
    "stddev": 0.1,
    "units": 3,
    "height": 4,
    "width": 4,
    "factor": 0.2,
    "height_factor": 0.2,
}
# Exported classes that are no part of a model in TensorFlow.
OTHERS = {
    "FlaxLayer": "of JAX",
    "InputSpec": "no layer",
    "JaxLayer": "of JAX",
    "Layer": "abstract",
    "Loss": "abstract",
    "Metric": "abstract",
    "Optimizer": "abstract",
    "OptimizerMap": "no optimizer",
    "Regularizer": "abstract",
    "TorchModuleWrapper": "of PyTorch",
    "Wrapper": "abstract",
}
_REGULARIZED = {"a weight": "kernel", "activities": "activity"}
_WITH_ARGUMENTS = {"threshold": lambda x: keras.activations.threshold(x, 0.5, 0.0)}


class _Explained(BaseException):
    """Ends a fit whose step is explained."""


def classes(kind: str) -> dict[str, type]:
    """Returns the exported classes of a kind that are parts of models, by name, each once."""
    named: dict[type, str] = {}
    for name, each in inspect.getmembers(getattr(keras, kind), inspect.isclass):
        if each.__name__ not in OTHERS and (name == each.__name__ or each not in named) and name[0].isupper():
            named[each] = name
    return {name: each for each, name in named.items()}


def made(name: str, each: type) -> Any:
    """Returns an object of a class with the arguments that it needs."""
    return each(**_ARGUMENTS.get(name, {}))


def parts(kind: str) -> dict[str, Callable[[], Any]]:
    """Returns a function for each part of a kind, by its name, that returns a compiled model and data for it."""
    if kind == "activations":
        functions = dict(inspect.getmembers(keras.activations, inspect.isfunction)) | _WITH_ARGUMENTS
        names = functions.keys() - {"deserialize", "get", "serialize"}
        uses = {name: lambda kind, x, name=name: kind(functions[name])(x) for name in sorted(names)}
        return {name: _bind(_of_layer, "Lambda", layers.Lambda, use) for name, use in uses.items()}
    if kind == "layers":
        return {name: _bind(_of_layer, name, each) for name, each in classes(kind).items()}
    makes = {name: _bind(made, name, each) for name, each in classes(kind).items()}
    if kind == "regularizers":
        pairs = [(f"{name} of {what}", make, of) for what, of in _REGULARIZED.items() for name, make in makes.items()]
        return {name: _bind(_of_regularizer, make, of) for name, make, of in pairs}
    if kind == "optimizers":
        return {name: _bind(_of_optimizer, make) for name, make in makes.items()}
    return {name: _bind(_of_compiled, kind, name, make) for name, make in makes.items()}


def specs(name: str) -> tuple[Inputs, Inputs]:
    """Returns labels and predictions of a loss or metric."""
    if name == "CTC":
        return Inputs((4,), "int32"), Inputs((9, 5))
    return Inputs((), "int32") if CLASSES.match(name) else Inputs((5,)), Inputs((5,))


def finding(make: Callable[[], Any], strategy: tfdist.Strategy, *, trains: bool = False) -> Finding:
    """Returns what the training step of a part's model needs; see `explained` for arguments."""
    try:
        return Finding.of(explained(make, strategy, trains=trains))
    except InputError as error:
        return Finding("refused", reason=str(error))


def explained(make: Callable[[], Any], strategy: tfdist.Strategy, *, trains: bool = False) -> Explanation:
    """Returns the explanation of the training step of a model.

    Args:
      make: returns the compiled model and its data.
      strategy: strategy of one replica.
      trains: whether a step is run.
    """
    found: list[Explanation] = []

    def tell(explanation: Explanation) -> None:
        found.append(explanation)
        if not trains:
            raise _Explained

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)  # by which some layers choose what they do when they are traced
    with strategy.scope():
        model, x, y = make()
    tfdist.distribute(model, strategy)
    with contextlib.suppress(_Explained), using_listener(tell):
        model.fit(x, y, batch_size=_ROWS, verbose=0)
    return found[0]


def of_example(code: str, strategy: tfdist.Strategy) -> str:
    """Returns the row of an example of the page: an expression of labels y and predictions x that is a loss."""

    def loss(y: tf.Tensor, x: tf.Tensor) -> Any:
        known = {"y": y, "x": x, "mask": tf.cast(y > 0.5, x.dtype), "loss": (y - x) ** 2}
        return eval(code, {**globals(), **known})

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile("sgd", loss)
        return model, Inputs((4,)).data(), Inputs((2,)).data()

    explanation = explained(make, strategy)
    found, metric = Finding.of(explanation), next(each for each in explanation.values if each.kind == "metric")
    operation = re.search(r"by (\w+) in", metric.sentence)
    label = f"all rows, by `{operation[1]}`" if operation else explanation.values[0].op
    return f"| `{code}` | {label} | {found.detail or 'nothing'} |"


def lines(kind: str, strategy: tfdist.Strategy) -> tuple[str, list[str]]:
    """Returns the row of a kind in the table of counts, and those of its parts that are not proved."""
    found = {name: finding(make, strategy, trains=kind == "optimizers") for name, make in parts(kind).items()}
    counts = collections.Counter(each.verdict for each in found.values())
    cells = [kind, len(found), *(counts[verdict] for verdict in VERDICTS)]
    others = [f"| {kind} | `{name}` {each.row}" for name, each in found.items() if each.verdict != "proved"]
    return f"| {' | '.join(map(str, cells))} |", others


def table(strategy: tfdist.Strategy) -> str:
    """Returns the section of the page."""
    counts, others = zip(*(lines(kind, strategy) for kind in KINDS), strict=True)
    left_out = ", ".join(f"`{name}` ({reason})" for name, reason in OTHERS.items())
    return "\n".join(
        [
            f"Keras {keras.__version__}:\n",
            f"| kind | parts | {' | '.join(VERDICTS)} |",
            f"| --- |{' --- |' * (1 + len(VERDICTS))}",
            *counts,
            "\n| kind | not proved | communicated | decided by | without a rule |",
            "| --- | --- | --- | --- | --- |",
            *itertools.chain(*others),
            f"\nExported, but no parts of a model in TensorFlow: {left_out}.\n",
        ]
    )


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


class _Tracking(layers.Layer):
    """Updates a metric with its inputs."""

    def __init__(self, metric: keras.Metric):
        super().__init__()
        self.metric = metric

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.metric.update_state(x)
        return x


def _of_compiled(kind: str, name: str, make: Callable[[], Any]) -> Any:
    if name in ("Mean", "Sum"):
        return _of_layer("Activation", layers.Activation, lambda _, x: _Tracking(make())(x))
    labels, predictions = specs(name)
    inputs = keras.Input(predictions.shape)
    model = keras.Model(inputs, layers.Dense(predictions.shape[-1], activation="sigmoid")(inputs))
    made = make()
    model.compile("sgd", **({"loss": made} if kind == "losses" else {"loss": _nothing, "metrics": [made]}))
    return model, predictions.data(), labels.data()


def _nothing(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return keras.ops.mean(x, -1)


def _of_layer(name: str, kind: type, use: Callable[..., Any] | None = None) -> Any:
    given, known_use = _LAYERS.get(name, (_default_inputs(name), _made))
    given = given if isinstance(given, list) else [given]
    inputs = [keras.Input(each.shape, dtype=each.dtype) for each in given]
    trained = [
        layers.Dense(x.shape[-1])(x) if each.dtype == "float32" else x for each, x in zip(given, inputs, strict=True)
    ]
    output = keras.tree.flatten((use or known_use)(kind, *trained))[0]
    output = output if output.dtype == "float32" else keras.ops.cast(output, "float32")
    if len(output.shape) > 2:
        output = layers.Flatten()(output)
    model = keras.Model(inputs, layers.Dense(2)(output))
    model.compile("sgd", "mse")
    data = [each.data() for each in given]
    return model, data if len(data) > 1 else data[0], Inputs((2,)).data()


def _default_inputs(name: str) -> Inputs:
    if _IMAGES.match(name):
        return _IMAGE
    shape = _BY_RANK.get(name.removesuffix("Transpose")[-2:], Inputs((4,))).shape
    return Inputs((3, *shape)) if name.startswith("ConvLSTM") else Inputs(shape)


def _made(kind: type, x: Any) -> Any:
    parameters = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.default is each.empty and each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    return kind(**{name: _REQUIRED[name] for name in parameters})(x)


def _exported() -> str:
    """Returns the directory of an exported model."""
    folder = tempfile.mkdtemp()
    keras.Sequential([keras.Input((4,)), layers.Dense(3)]).export(folder, verbose=False)
    return folder


def _of_regularizer(make: Callable[[], Any], of: str) -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, **{f"{of}_regularizer": make()}), layers.Dense(2)])
    model.compile("sgd", "mse")
    return model, Inputs((4,)).data(), Inputs((2,)).data()


def _of_optimizer(make: Callable[[], Any]) -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile(make(), "mse")
    return model, Inputs((4,)).data(), Inputs((2,)).data()


if __name__ == "__main__":
    one = tfdist.load_strategy("single")
    if kinds := sys.argv[1:]:
        for kind in kinds:
            first, rows = lines(kind, one)
            print(first, *rows, sep="\n", flush=True)
    else:
        written = table(one)
        before, after = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + written + END + after.partition(END)[2], "utf-8")
