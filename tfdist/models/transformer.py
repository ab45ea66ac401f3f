"""A small decoder language model."""

from collections.abc import Sequence

import keras
import numpy as np

from tfdist.dims import name_dims
from tfdist.errors import InputError
from tfdist.models import arguments

# A bias on the keys adds the same number to all scores of a query, and softmax does not see it.
ZERO_GRADIENT: tuple[str, ...] = (r"_attention/key/bias$",)

# Beside what the types of layers say; see `tfdist.name_dims`.
DIMS = {
    "position_embedding/embeddings": "* embed",
    r"block_\d+_ffn_in/kernel": "embed ffn",
    r"block_\d+_ffn_in/bias": "ffn",
    r"block_\d+_ffn_out/kernel": "ffn embed",
    r"block_\d+_ffn_out/bias": "embed",
    "logits/kernel": "embed vocab",
    "logits/bias": "vocab",
}


def transformer(
    *,
    input_shape: Sequence[int],
    classes: int,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    ffn: int | None = None,
    dropout: float = 0.0,
) -> keras.Model:
    """Pre-norm blocks of causal attention and a two-layer perceptron; learned positions (Radford et al., 2019).

    Args:
      input_shape: (length,) of one example of token numbers.
      classes: the size of the vocabulary, at least 1.
      layers: the number of blocks.
      width: of the residual stream; a multiple of heads.
      heads: attention heads in each block.
      ffn: the width inside the perceptrons; 4 * width if None.
      dropout: rate, in [0, 1), on the embeddings and on what each block adds; there is no such layer if 0.

    Returns:
      A model of (batch, length) token numbers to (batch, length, classes): logits of each next token.

    Raises:
      InputError: an argument is out of its range.
    """
    (length,) = arguments.shape("transformer", input_shape, ("length",))
    vocabulary = arguments.positive("transformer", "classes", classes)
    width, heads = arguments.positive("transformer", "width", width), arguments.positive("transformer", "heads", heads)
    if width % heads:
        raise InputError(f"transformer: width must be a multiple of heads. Received: width={width}, heads={heads}.")
    inner = arguments.positive("transformer", "ffn", 4 * width if ffn is None else ffn)
    dropout = arguments.rate("transformer", "dropout", dropout)

    tokens = keras.Input((length,), dtype="int32", name="tokens")
    # Derived from the input: a layer called on a constant would leave the graph, and its variable would be a constant.
    positions = tokens * 0 + np.arange(length, dtype="int32")
    x = keras.layers.Add(name="embedding")(
        [
            keras.layers.Embedding(vocabulary, width, name="token_embedding")(tokens),
            keras.layers.Embedding(length, width, name="position_embedding")(positions),
        ]
    )
    x = _dropout(x, dropout, "embedding_dropout")
    for i in range(arguments.positive("transformer", "layers", layers)):
        x = _block(x, f"block_{i}", width, heads, inner, dropout)
    x = keras.layers.LayerNormalization(name="final_norm")(x)
    logits = keras.layers.Dense(vocabulary, name="logits")(x)
    return name_dims(keras.Model(tokens, logits, name="transformer"), DIMS)


def _block(x: keras.KerasTensor, name: str, width: int, heads: int, inner: int, dropout: float) -> keras.KerasTensor:
    y = keras.layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    y = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y, use_causal_mask=True)
    x = keras.layers.Add(name=f"{name}_attention_add")([x, _dropout(y, dropout, f"{name}_attention_dropout")])
    y = keras.layers.LayerNormalization(name=f"{name}_ffn_norm")(x)
    y = keras.layers.Dense(inner, activation="gelu", name=f"{name}_ffn_in")(y)
    y = keras.layers.Dense(width, name=f"{name}_ffn_out")(y)
    return keras.layers.Add(name=f"{name}_ffn_add")([x, _dropout(y, dropout, f"{name}_ffn_dropout")])


def _dropout(x: keras.KerasTensor, rate: float, name: str) -> keras.KerasTensor:
    return keras.layers.Dropout(rate, name=name)(x) if rate else x
