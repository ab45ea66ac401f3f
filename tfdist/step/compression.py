"""Compression options of a trainer, and the reducer of gradients that they determine."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.config.rules import user_methods
from tfdist.gradients import Reducer
from tfdist.gradients.bucket import BACKWARD, BUCKET_BYTES
from tfdist.gradients.compression import COMPRESSION_MIN_BYTES, EXACT, Choice, create_reducer, parse_choice


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Options for the sum of gradients over replicas."""

    methods: str | Reducer = "none"  # value of `--compression`, or a custom reducer
    min_bytes: int = COMPRESSION_MIN_BYTES  # gradients smaller than this many bytes are summed exactly
    bucket_bytes: int = BUCKET_BYTES  # small gradients are sent together in messages of at most this many bytes
    bucket_order: str = BACKWARD  # order in which these messages and large gradients are sent: "backward" or "smallest"

    @functools.cached_property
    def choice(self) -> Choice | None:
        """The options of `auto`, which chooses methods by measurement; None for other methods."""
        return None if isinstance(self.methods, Reducer) else parse_choice(self.methods)

    @property
    def rules(self) -> str:
        """The compression methods at the start of a run, as in `--compression`."""
        return EXACT if isinstance(self.methods, Reducer) or self.choice else self.methods

    def includes_code(self, methods: str) -> bool:
        """Returns whether these options contain all user code that `methods` refers to."""
        return user_methods(methods) <= user_methods(self.choice.allow if self.choice else self.rules)

    def reducer(
        self, tensors: Sequence[tf.TensorSpec], overrides: Mapping[str, str], sparse: Collection[str]
    ) -> Reducer:
        """Returns the reducer of `tensors`; `overrides` maps names of tensors to other methods. See `create_reducer`."""
        if isinstance(self.methods, Reducer):
            return self.methods
        return create_reducer(
            tensors,
            self.rules,
            overrides=overrides,
            sparse=sparse,
            min_bytes=self.min_bytes,
            bucket_bytes=self.bucket_bytes,
            bucket_order=self.bucket_order,
        )
