"""Summation of a trainer's gradients over replicas: the options of compression, and the reducer that they determine."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.config.rules import own_code
from tfdist.gradients import Reducer, Sum
from tfdist.gradients.bucket import BACKWARD, BUCKET_BYTES
from tfdist.gradients.compression import COMPRESSION_MIN_BYTES, EXACT, Choice, create_reducer, parse_choice


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Options of the sum of gradients over replicas.

    Attributes:
      methods: as in `--compression`, or a custom reducer.
      min_bytes: gradients smaller than this many bytes are summed exactly.
      bucket_bytes: small gradients are sent together in messages of at most this many bytes.
      bucket_order: order in which these messages and large gradients are sent: "backward" or "smallest".
    """

    methods: str | Reducer = "none"
    min_bytes: int = COMPRESSION_MIN_BYTES
    bucket_bytes: int = BUCKET_BYTES
    bucket_order: str = BACKWARD

    @property
    def takes_rows(self) -> bool:
        """Whether `reducer` supports gradients as rows, which a custom reducer may not."""
        return not isinstance(self.methods, Reducer)

    @functools.cached_property
    def choice(self) -> Choice | None:
        """When and among which methods to choose by measurement, for `auto`; None otherwise."""
        return None if isinstance(self.methods, Reducer) else parse_choice(self.methods)

    @property
    def rules(self) -> str:
        """The initial methods."""
        return EXACT if isinstance(self.methods, Reducer) or self.choice else self.methods

    def names(self, methods: str) -> bool:
        """Returns whether this object also refers to all user code to which some methods refer."""
        return own_code(methods) <= own_code(self.choice.allow if self.choice else self.rules)

    def reducer(
        self, tensors: Sequence[tf.TensorSpec], overrides: Mapping[str, str], sparse: Collection[str]
    ) -> Reducer:
        """Returns the reducer for these tensors, with other methods for those in `overrides`; see `create_reducer`."""
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

    def payload_bytes(self, sent: Recording) -> int:
        """Returns the number of bytes that a replica has sent for gradients."""
        return sent.payload_bytes


class SummedByEngine(Compression):
    """For a strategy whose engine sums gradients, which are left as they are: a bucket would gather their shards."""

    takes_rows = False

    def reducer(
        self, tensors: Sequence[tf.TensorSpec], overrides: Mapping[str, str], sparse: Collection[str]
    ) -> Reducer:
        """See base class."""
        return Sum()

    def payload_bytes(self, sent: Recording) -> int:
        """See base class; `tfdist layout` predicts the engine's messages."""
        return 0
