"""Horovod's `DistributedGradientTape` and `PartialDistributedGradientTape`, with tfdist's reducers."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.compression import Compression, is_lossless, validate_compression
from tfdist.horovod.gradient_sums import GradientSums, Options, key_of
from tfdist.horovod.operations import with_alternative_signature
from tfdist.horovod.ops import Average, Sum, to_reduce_op
from tfdist.horovod.optimizer import check_groups, local_variables
from tfdist.horovod.process_sets import global_process_set


class DistributedTape(tf.GradientTape):
    """A tape that reduces its gradients over the ranks, except for the gradients of `local_sources`."""

    __slots__ = ("_local_keys", "_reduction")

    def __init__(self, tape: tf.GradientTape, reduction: GradientSums, local_sources: Sequence[Any]):
        self.__dict__ = tape.__dict__  # type: ignore[misc]  # shares the recording, which may be in progress
        self._reduction, self._local_keys = reduction, set(map(key_of, local_sources))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """See base class. Returns the reduced gradients; the sources have the same order on every rank.

        `use_generic_names` is accepted, but has no effect.

        Raises:
          InputError: the ranks' gradients differ in name, dtype or shape.
        """
        source_list = keras.tree.flatten(sources)
        gradients = super().gradient(target, source_list, output_gradients, unconnected_gradients)
        return keras.tree.pack_sequence_as(sources, self._reduction(gradients, source_list, self._local_keys))

    def register_local_source(self, source: Any) -> None:
        """Excludes the gradient of a source from the reduction."""
        self._local_keys.add(key_of(source))

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns two lists of pairs (source, gradient): local gradients, and reduced gradients."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local_pairs = [pair for pair in pairs if key_of(pair[0]) in self._local_keys]
        return local_pairs, [pair for pair in pairs if key_of(pair[0]) not in self._local_keys]


# Tapes are created in each step, but the state of compressions and the results of comparisons persist.
_reductions: dict[Options, GradientSums] = {}


def reset_state() -> None:
    """Resets the state of the tapes' compressions on this rank."""
    for reduction in _reductions.values():
        reduction.reset_state()


def DistributedGradientTape(  # noqa: D417, N802 - Horovod's name; see DistributedOptimizer for other arguments
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    local_layers: keras.Layer | Sequence[keras.Layer] | None = None,
) -> DistributedTape:
    """Returns a tape whose `gradient` method reduces gradients over the ranks.

    All tapes of this process with the same arguments share the compression's state, which is stored by variable name.

    Args:
      gradtape: a tape, before or after recording.
      op: Average, Sum, or another operation of `allreduce`, which the engine applies to each tensor separately, converting
        sparse gradients to dense tensors.
      local_layers: built layers whose gradients are not reduced, but divided by the number of ranks if
        `scale_local_gradients`; an argument of `PartialDistributedGradientTape`. For the other arguments, see
        `DistributedOptimizer`.
    """
    check_groups(num_groups, groups)
    compression, reduce_op = validate_compression(compression), to_reduce_op(op)
    if reduce_op not in (Average, Sum) and not is_lossless(compression):
        raise InputError(
            f"op=hvd.{reduce_op.name} takes Compression.none or .fp16. Received: {compression.text}. Use "
            "op=hvd.Average, or remove compression."
        )
    name, arguments = "DistributedGradientTape", (gradient_predivide_factor, process_set, scale_local_gradients)
    options = Options(name, compression, sparse_as_dense, reduce_op, *arguments, device_dense)
    reduction = _reductions.setdefault(options, GradientSums(options))
    return DistributedTape(gradtape, reduction, local_variables(local_layers))


_PARTIAL_ARGUMENTS = (
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups"
    " process_set local_layers scale_local_gradients"
).split()
# Horovod's function with the argument `local_layers`.
PartialDistributedGradientTape = with_alternative_signature(_PARTIAL_ARGUMENTS, lambda *args: True)(
    DistributedGradientTape
)
