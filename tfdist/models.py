"""Builds small reference models that return logits, and models by name: these, or a user-defined `package.module:function`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.config.spec import call_user_function, load_object, parse
from tfdist.distribution.variable_layouts import name_dims
from tfdist.errors import InputError, is_integer, nearest
from tfdist.keras_internals import layers_of
from tfdist.layers import MixtureOfExperts, SyncBatchNormalization
from tfdist.layers.sharding_constraint import constrain

__all__ = ["NAMES", "build", "cnn", "mlp", "resnet50", "transformer", "with_batch_norm", "zero_gradient_patterns"]
_LAYERS: dict[str, type[keras.layers.BatchNormalization]] = {
    "local": keras.layers.BatchNormalization,
    "synchronized": SyncBatchNormalization,
}


def layer_class(batch_norm: str) -> type[keras.layers.BatchNormalization]:
    """Returns the layer class for "local" or "synchronized".

    Raises:
      InputError: the kind is unknown.
    """
    if batch_norm not in _LAYERS:
        raise InputError(f'Batch normalization "{batch_norm}" is not known.{nearest(str(batch_norm), _LAYERS)}')
    return _LAYERS[batch_norm]


def with_batch_norm(model: keras.Model, batch_norm: str) -> keras.Model:
    """Replaces the batch normalization layers of a model with another kind, with the same weights and names.

    All other layers are shared with the given model, so only one of the two models may be trained.

    Args:
      model: functional or sequential model, including nested and user-defined ones.
      batch_norm: "synchronized" replaces `keras.layers.BatchNormalization` with `tfdist.layers.SyncBatchNormalization`;
        "local" does the reverse, for a file that Keras can load without tfdist. Subclasses of either are not replaced.

    Returns:
      The new model, or the given one if there is nothing to replace.

    Raises:
      InputError: the kind is unknown, or a layer cannot be replaced.
    """
    new_class = layer_class(batch_norm)
    (old_class,) = set(_LAYERS.values()) - {new_class}
    if not _layers_of_class(model, old_class):
        return model
    replacements: list[tuple[keras.Layer, keras.Layer]] = []

    def replace(layer: keras.Layer) -> keras.Layer:
        if type(layer) is not old_class:
            return layer
        replacements.append((layer, _convert(layer, new_class)))
        return replacements[-1][1]

    try:
        clone = keras.models.clone_model(model, clone_function=replace, recursive=True)
    except (TypeError, ValueError) as error:
        raise _replacement_error(model, old_class, new_class, " ".join(str(error).split())) from error
    if old_layers := _layers_of_class(clone, old_class):
        raise _replacement_error(model, old_class, new_class, f"{old_layers[0].path} belongs to a user-defined layer")
    for old_layer, new_layer in replacements:
        if old_layer.built and new_layer.built:
            new_layer.set_weights(old_layer.get_weights())
    return clone


def _convert(layer: keras.Layer, new_class: type[keras.Layer]) -> keras.Layer:
    config = layer.get_config()
    if config.pop("renorm", False):
        raise InputError(f"Batch renormalization cannot be synchronized. Received: {layer.path}. Use renorm=False.")
    for name in ("synchronized", "renorm_clipping", "renorm_momentum"):
        config.pop(name, None)
    return new_class.from_config(config)


def _layers_of_class(model: keras.Model, layer_class: type[keras.Layer]) -> list[keras.Layer]:
    return [layer for layer in layers_of(model) if type(layer) is layer_class]


def _replacement_error(model: keras.Model, old_class: type, new_class: type, reason: str) -> InputError:
    return InputError(
        f"Only the layers of functional and sequential models can be replaced. Received: {model.name}: {reason}. Use "
        f"{new_class.__module__.partition('.')[0]}.layers.{new_class.__name__} instead of {old_class.__name__} in the model."
    )


def _classes_argument(model: str, value: Any) -> int:
    if not _is_positive(value):
        remedy = f" The dataset does not define it: pass {model}(classes=...)." if value is None else ""
        raise InputError(f"{model}: classes must be an integer, at least 1. Received: {value!r}.{remedy}")
    return int(value)


def _input_shape_argument(model: str, value: Any, dims: Sequence[str] = ()) -> tuple[int, ...]:
    """Returns the static shape of one example; `dims` are the names of the expected dims, empty for any."""
    dim_sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
    if not all(map(_is_positive, dim_sizes)) or (dims and len(dim_sizes) != len(dims)):
        rule = f"be ({', '.join(dims)}{',' if len(dims) == 1 else ''})" if dims else "have known sizes only"
        raise InputError(
            f"{model}: an example's shape must {rule}. Received: {value!r}. Use a model that fits the data."
        )
    return tuple(map(int, dim_sizes))


def _is_positive(value: Any) -> bool:
    return is_integer(value) and int(value) >= 1


def mlp(*, input_shape: Sequence[int], classes: int, hidden: int | Sequence[int] = (256, 128)) -> keras.Model:
    """Builds dense layers with ReLU between them, applied to the flattened example.

    Args:
      input_shape: shape of one example, of any rank.
      classes: number of logits, at least 1.
      hidden: width of each hidden layer; empty for a linear model.

    Returns:
      A model that maps (batch, *input_shape) to (batch, classes).

    Raises:
      InputError: the shape, the number of classes or another size is invalid.
    """
    inputs = keras.Input(_input_shape_argument("mlp", input_shape), name="inputs")
    x = keras.layers.Flatten(name="flatten")(inputs)
    for i, width in enumerate((hidden,) if isinstance(hidden, int) else hidden):
        x = keras.layers.Dense(width, activation="relu", name=f"hidden_{i}")(x)
    logits = keras.layers.Dense(_classes_argument("mlp", classes), name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")


def cnn(
    *, input_shape: Sequence[int], classes: int, filters: int | Sequence[int] = (32, 64), batch_norm: str = "local"
) -> keras.Model:
    """Builds blocks of 3x3 convolution, batch normalization, ReLU and 2x2 max pooling, followed by a dense layer.

    Args:
      input_shape: (height, width, channels) of one example.
      classes: number of logits, at least 1.
      filters: output channels of each block. Each block halves height and width, rounded up.
      batch_norm: "local" or "synchronized".

    Returns:
      A model that maps (batch, height, width, channels) to (batch, classes).

    Raises:
      InputError: the shape, the number of classes or another size is invalid.
    """
    normalization = layer_class(batch_norm)
    channels_last = {"data_format": "channels_last"}
    inputs = keras.Input(_input_shape_argument("cnn", input_shape, ("height", "width", "channels")), name="inputs")
    x = inputs
    for i, channels in enumerate((filters,) if isinstance(filters, int) else filters):
        # Without a bias, which the normalization would subtract again and whose gradient would be rounding noise.
        x = keras.layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"conv_{i}", **channels_last)(x)
        # Moving statistics adapt within tens of steps: Keras's 0.99 needs more steps than a small dataset provides.
        x = normalization(momentum=0.9, name=f"norm_{i}")(x)
        x = keras.layers.ReLU(name=f"relu_{i}")(x)
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{i}", **channels_last)(x)
    x = keras.layers.Flatten(name="flatten", **channels_last)(x)
    logits = keras.layers.Dense(_classes_argument("cnn", classes), name="logits")(x)
    return keras.Model(inputs, logits, name="cnn")


def resnet50(*, input_shape: Sequence[int], classes: int, batch_norm: str = "local") -> keras.Model:
    """Builds `keras.applications.ResNet50` without pretrained weights (He et al., "Deep residual learning", 2015).

    Args:
      input_shape: (height, width, channels) of one example; height and width at least 32.
      classes: number of logits, at least 1.
      batch_norm: "local" or "synchronized".

    Returns:
      A model that maps (batch, height, width, channels) to (batch, classes).

    Raises:
      InputError: the shape, the number of classes or another size is invalid.
    """
    height, width, channels = _input_shape_argument("resnet50", input_shape, ("height", "width", "channels"))
    if min(height, width) < 32:
        raise InputError(f"resnet50: height and width must be at least 32. Received: {input_shape!r}. Use --model=cnn.")
    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(height, width, channels),
        classes=_classes_argument("resnet50", classes),
        classifier_activation=None,
    )
    return with_batch_norm(model, batch_norm)


# Names in addition to those derived from layer types; see `tfdist.name_dims`.
DIMS = {
    "position_embedding/embeddings": "* embed",
    r"block_\d+_ffn_in/kernel": "embed ffn",
    r"block_\d+_ffn_in/bias": "ffn",
    r"block_\d+_ffn_out/kernel": "ffn embed",
    r"block_\d+_ffn_out/bias": "embed",
    "logits/kernel": "embed vocab",
    "logits/bias": "vocab",
}

# The sequence dim has two names, because it can be sharded differently between and inside blocks; see `tfdist.constrain`.
BETWEEN_BLOCKS, INSIDE_BLOCKS = "batch sequence embed", "batch context embed"


def transformer(
    *,
    input_shape: Sequence[int],
    classes: int,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    ffn: int | None = None,
    dropout: float = 0.0,
    experts: int = 0,
    choices: int = 2,
    capacity_factor: float = 1.25,
    overflow: str = "drop",
) -> keras.Model:
    """Builds pre-norm blocks of causal attention and a two-layer perceptron, with learned positions (Radford et al., 2019).

    Args:
      input_shape: (length,) of one example of token ids.
      classes: size of the vocabulary, at least 1.
      layers: number of blocks.
      width: width of the residual stream; a multiple of heads.
      heads: number of attention heads per block.
      ffn: inner width of the perceptrons; 4 * width if None.
      dropout: rate, in [0, 1), for the embeddings and the output of each block; with 0 there are no dropout layers.
      experts: number of experts of `tfdist.layers.MixtureOfExperts`, which replaces the perceptron of every second
        block, as in GShard; 0 for none.
      choices: number of experts per token.
      capacity_factor: capacity of an expert as a multiple of an even load.
      overflow: whether to "drop" tokens beyond an expert's capacity, or to "spill" them to the least loaded expert.

    Returns:
      A model that maps (batch, length) token ids to (batch, length, classes): logits of each next token.

    Raises:
      InputError: the shape, the number of classes or another size is invalid.
    """
    (length,) = _input_shape_argument("transformer", input_shape, ("length",))
    vocabulary = _classes_argument("transformer", classes)
    if width % heads:
        raise InputError(f"transformer: width must be a multiple of heads. Received: width={width}, heads={heads}.")
    inner = 4 * width if ffn is None else ffn

    inputs = keras.Input((length,), dtype="int32", name="tokens")
    tokens = constrain(inputs, "batch sequence", "tokens_between")
    # Derived from the input: a layer called on a constant would not be part of the model, and its variable not be trained.
    positions = constrain(inputs * 0 + np.arange(length, dtype="int32"), "batch sequence", "positions_between")
    x = keras.layers.Add(name="embedding")(
        [
            keras.layers.Embedding(vocabulary, width, name="token_embedding")(tokens),
            keras.layers.Embedding(length, width, name="position_embedding")(positions),
        ]
    )
    x = _dropout(constrain(x, BETWEEN_BLOCKS, "embedding_between"), dropout, "embedding_dropout")
    if experts and layers < 2:
        raise InputError(
            f"transformer: experts are in every second block. Received: experts={experts}, layers={layers}."
        )
    mixture = {"experts": experts, "choices": choices, "capacity_factor": capacity_factor, "overflow": overflow}
    for i in range(layers):
        x = _attention(x, f"block_{i}", width, heads, dropout)
        x = _perceptron(x, f"block_{i}", width, inner, dropout, mixture if experts and i % 2 else {})
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    logits = keras.layers.Dense(vocabulary, name="logits")(constrain(x, INSIDE_BLOCKS, "logits_inside"))
    return name_dims(keras.Model(inputs, logits, name="transformer"), DIMS)


def _attention(x: keras.KerasTensor, name: str, width: int, heads: int, dropout: float) -> keras.KerasTensor:
    y = _normalize(x, f"{name}_attention")
    y = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y, use_causal_mask=True)
    return _add_residual(x, y, f"{name}_attention", dropout)


def _perceptron(
    x: keras.KerasTensor, name: str, width: int, inner: int, dropout: float, mixture: Mapping[str, Any]
) -> keras.KerasTensor:
    y = _normalize(x, f"{name}_ffn")
    if mixture:
        y = MixtureOfExperts(width=inner, name=f"{name}_experts", **mixture)(y)
    else:
        y = keras.layers.Dense(inner, activation="gelu", name=f"{name}_ffn_in")(y)
        y = keras.layers.Dense(width, name=f"{name}_ffn_out")(y)
    return _add_residual(x, y, f"{name}_ffn", dropout)


def _normalize(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    return constrain(keras.layers.LayerNormalization(name=f"{name}_norm")(x), INSIDE_BLOCKS, f"{name}_inside")


def _add_residual(x: keras.KerasTensor, y: keras.KerasTensor, name: str, dropout: float) -> keras.KerasTensor:
    y = _dropout(constrain(y, BETWEEN_BLOCKS, f"{name}_between"), dropout, f"{name}_dropout")
    return keras.layers.Add(name=f"{name}_add")([x, y])


def _dropout(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


_MODELS: dict[str, Callable[..., keras.Model]] = {f.__name__: f for f in (mlp, cnn, resnet50, transformer)}
NAMES = tuple(_MODELS)
_ZERO_GRADIENTS: dict[str, tuple[str, ...]] = {
    # Each convolution has a bias, which the following batch normalization subtracts again.
    "resnet50": (r"^conv\d+(_block\d+_\d+)?_conv/bias$",),
    # The bias of the keys adds the same number to all scores of a query, which does not change the softmax.
    "transformer": (r"_attention/key/bias$",),
}


def build(spec: str, input_shape: Sequence[int], classes: int) -> keras.Model:
    """Builds the model of a spec: `cnn`, `transformer(layers=4)`, `package.module:function(width=64)`.

    Args:
      spec: name of the model, optionally with arguments.
      input_shape: shape of one example, without the batch dim.
      classes: number of classes, or of tokens in the vocabulary, in the data.

    Returns:
      A Keras model. A user's function gets input_shape and classes if it has these parameters; arguments in the spec
      take precedence.

    Raises:
      InputError: the name or an argument is unknown, a user's module cannot be imported, the function raises (its own
        error is shown), or it does not return a Keras model.
    """
    model_spec = parse(spec)
    function, data_arguments = _model_function(model_spec.name), {"input_shape": tuple(input_shape), "classes": classes}
    model = call_user_function("--model", function, model_spec, **data_arguments)
    if not isinstance(model, keras.Model):
        raise InputError(
            f"--model={spec} must return a keras.Model. Received: {type(model).__name__}. Return the model."
        )
    return model


def zero_gradient_patterns(model_name: str) -> tuple[str, ...]:
    """Returns regular expressions (for `re.search`) that match paths of variables whose true gradient is zero.

    An optimizer turns their rounding noise into updates that differ between runs but do not change the model's output.

    Args:
      model_name: name of the model, or a spec with arguments; the result is empty for user-defined models.
    """
    return _ZERO_GRADIENTS.get(parse(model_name).name, ())


def _model_function(name: str) -> Callable[..., keras.Model]:
    if ":" in name:
        function = load_object(name)
        if not callable(function):
            raise InputError(f"--model={name} must name a function. Received: {type(function).__name__}.")
        return function
    if name not in _MODELS:
        raise InputError(
            f"--model={name} is not known.{nearest(name, NAMES)} For your own, use package.module:function."
        )
    return _MODELS[name]
