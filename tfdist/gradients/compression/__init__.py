"""Gradient compression: quantization, sparsification, low-rank factorization and sketching.

`methods/` has one method per file. Shared code is in this package, and `catalog.py` maps names to methods.
"""

from tfdist.gradients.compression.catalog import (
    COMPRESSION_MIN_BYTES,
    EXACT,
    METHODS,
    Choice,
    check,
    choose_methods,
    create,
    create_reducer,
    parse_choice,
)
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.reducers import CodecReducer, seed_of

__all__ = [
    "COMPRESSION_MIN_BYTES",
    "EXACT",
    "METHODS",
    "Choice",
    "Codec",
    "CodecReducer",
    "check",
    "choose_methods",
    "create_reducer",
    "create",
    "parse_choice",
    "seed_of",
]
