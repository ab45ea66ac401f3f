"""A small decoder-only language model."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.errors import InputError
from tfdist.layers import MixtureOfExperts
from tfdist.layers.sharding_constraint import constrain
from tfdist.models import arguments
from tfdist.sharding.variable_layouts import name_dims

# In addition to the names from layer types; see `tfdist.name_dims`.
DIMS = {
    "position_embedding/embeddings": "* embed",
    r"block_\d+_ffn_in/kernel": "embed ffn",
    r"block_\d+_ffn_in/bias": "ffn",
    r"block_\d+_ffn_out/kernel": "ffn embed",
    r"block_\d+_ffn_out/bias": "embed",
    "logits/kernel": "embed vocab",
    "logits/bias": "vocab",
}

# The sequence has two names, so that it can be sharded differently between and inside blocks; see `tfdist.constrain`.
BETWEEN, INSIDE = "batch sequence embed", "batch context embed"


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
    """Pre-norm blocks of causal attention and a two-layer perceptron; learned positions (Radford et al., 2019).

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
      overflow: for tokens beyond an expert's capacity: "drop", or "spill" to the least loaded expert.

    Returns:
      A model of (batch, length) token ids to (batch, length, classes): logits of each next token.

    Raises:
      InputError: an argument is out of range.
    """
    (length,) = arguments.shape("transformer", input_shape, ("length",))
    vocabulary = arguments.positive("transformer", "classes", classes)
    width, heads = arguments.positive("transformer", "width", width), arguments.positive("transformer", "heads", heads)
    if width % heads:
        raise InputError(f"transformer: width must be a multiple of heads. Received: width={width}, heads={heads}.")
    inner = arguments.positive("transformer", "ffn", 4 * width if ffn is None else ffn)
    dropout = arguments.rate("transformer", "dropout", dropout)

    inputs = keras.Input((length,), dtype="int32", name="tokens")
    tokens = constrain(inputs, "batch sequence", "tokens_between")
    # Derived from the input: a layer called on a constant would not be part of the graph, and its variable a constant.
    positions = constrain(inputs * 0 + np.arange(length, dtype="int32"), "batch sequence", "positions_between")
    x = keras.layers.Add(name="embedding")(
        [
            keras.layers.Embedding(vocabulary, width, name="token_embedding")(tokens),
            keras.layers.Embedding(length, width, name="position_embedding")(positions),
        ]
    )
    x = _dropout(constrain(x, BETWEEN, "embedding_between"), dropout, "embedding_dropout")
    if experts and layers < 2:
        raise InputError(
            f"transformer: experts are in every second block. Received: experts={experts}, layers={layers}."
        )
    mixture = {"experts": experts, "choices": choices, "capacity_factor": capacity_factor, "overflow": overflow}
    for i in range(arguments.positive("transformer", "layers", layers)):
        x = _attention(x, f"block_{i}", width, heads, dropout)
        x = _perceptron(x, f"block_{i}", width, inner, dropout, mixture if experts and i % 2 else {})
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    logits = keras.layers.Dense(vocabulary, name="logits")(constrain(x, INSIDE, "logits_inside"))
    return name_dims(keras.Model(inputs, logits, name="transformer"), DIMS)


def _attention(x: keras.KerasTensor, name: str, width: int, heads: int, dropout: float) -> keras.KerasTensor:
    y = _normalized(x, f"{name}_attention")
    y = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y, use_causal_mask=True)
    return _added(x, y, f"{name}_attention", dropout)


def _perceptron(
    x: keras.KerasTensor, name: str, width: int, inner: int, dropout: float, mixture: Mapping[str, Any]
) -> keras.KerasTensor:
    y = _normalized(x, f"{name}_ffn")
    if mixture:
        y = MixtureOfExperts(width=inner, name=f"{name}_experts", **mixture)(y)
    else:
        y = keras.layers.Dense(inner, activation="gelu", name=f"{name}_ffn_in")(y)
        y = keras.layers.Dense(width, name=f"{name}_ffn_out")(y)
    return _added(x, y, f"{name}_ffn", dropout)


def _normalized(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    return constrain(keras.layers.LayerNormalization(name=f"{name}_norm")(x), INSIDE, f"{name}_inside")


def _added(x: keras.KerasTensor, y: keras.KerasTensor, name: str, dropout: float) -> keras.KerasTensor:
    y = _dropout(constrain(y, BETWEEN, f"{name}_between"), dropout, f"{name}_dropout")
    return keras.layers.Add(name=f"{name}_add")([x, y])


def _dropout(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    return keras.layers.Dropout(rate, name=name)(x) if rate else x
