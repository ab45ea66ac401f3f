"""A wrapper around collectives that records calls and the payload that a replica sends."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A recorded call; recorded during tracing in `tf.function`, else when it is executed.

    Attributes:
      operation: name of the method.
      name: name of the call, as given by the caller.
      dtypes: dtype of each tensor.
      shapes: static shape of each tensor; None for a dim that is unknown during tracing.
      ranks: the group that communicates, as ranks of the outermost recording: sender and receiver of a message; None
        for all replicas.
    """

    operation: str
    name: str
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    ranks: tuple[int, ...] | None = None

    @property
    def payload_bytes(self) -> int:
        """The bytes that one replica passes in; unknown dims count as 0, and so does a message that it receives."""
        if self.operation == "receive":
            return 0
        sizes = (tf.TensorShape([dim or 0 for dim in shape]).num_elements() for shape in self.shapes)
        return sum(size * dtype.size for size, dtype in zip(sizes, self.dtypes, strict=True))


class Recording(ForwardingCollectives):
    """Collectives that record the calls made through them and through their groups; splits do not count as payload.

    Attributes:
      calls: the calls so far.
    """

    def __init__(
        self, inner: Collectives, calls: list[RecordedCall] | None = None, ranks: tuple[int, ...] | None = None
    ):
        """Wraps other collectives.

        Args:
          inner: collectives that do the work.
          calls: list to which calls are added; by default a new one.
          ranks: ranks of these collectives, if they are those of a group, in the outermost recording.
        """
        super().__init__(inner)
        self.calls: list[RecordedCall] = [] if calls is None else calls
        self._ranks = ranks

    @property
    def payload_bytes(self) -> int:
        """The payload of all calls recorded so far, in bytes per replica."""
        return sum(call.payload_bytes for call in self.calls)

    def payload_between_hosts(self, topology: Topology) -> int:
        """The part of `payload_bytes` of which some crosses links between hosts.

        A collective of ranks on several hosts counts with its whole payload: how much of it crosses depends on the
        engine. The rest of `payload_bytes` stays inside a host.

        Args:
          topology: hosts of the outermost recording's ranks.
        """
        everyone = range(topology.size)
        crossing = (call for call in self.calls if topology.spans_hosts(call.ranks or everyone))
        return sum(call.payload_bytes for call in crossing)

    @property
    def has_unknown_shapes(self) -> bool:
        """Whether a shape was unknown when a call was traced, so that it may change from step to step."""
        return any(None in shape for call in self.calls for shape in call.shapes)

    def group(self, ranks: Sequence[int]) -> "Recording":
        """See base class; the group's calls are added to `calls`."""
        outer = self._outer(self.checked(ranks))
        return Recording(self._inner.group(ranks), self.calls, None if self._is_everyone(outer) else outer)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        self.check_message(tensors, to, tag)
        self._add("send", [tf.TensorSpec(x.shape, x.dtype) for x in tensors], tag, self._outer([self.static_rank, to]))
        return super().send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        self.check_message(specs, source, tag)
        self._add("receive", specs, tag, self._outer([source, self.static_rank]))
        return super().receive(specs, source, tag=tag)

    def _outer(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank if self._ranks is None else self._ranks[rank] for rank in ranks)

    def _is_everyone(self, outer: tuple[int, ...]) -> bool:
        return self._ranks is None and outer == tuple(range(self.size))

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """See base class."""
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self._add(operation, [tf.TensorSpec(x.shape, x.dtype) for x in given], name, self._ranks)

    def _add(self, operation: str, specs: Sequence[tf.TensorSpec], name: str, ranks: tuple[int, ...] | None) -> None:
        shapes = tuple(tuple(spec.shape.as_list()) for spec in specs)
        self.calls.append(RecordedCall(operation, name, tuple(spec.dtype for spec in specs), shapes, ranks))
