"""Messages between two replicas, and vectors that can be divided into equal parts."""

import tensorflow as tf

from tfdist.collectives.interface import Collectives


def padded(vector: tf.Tensor, parts: int) -> tf.Tensor:
    """Returns a vector with zeros at its end, so that it can be divided into equal parts."""
    return tf.pad(vector, [[0, -vector.shape[0] % parts]])


def receive(collectives: Collectives, like: tf.Tensor, source: int, tag: str) -> tf.Tensor:
    """Receives a vector of the shape and dtype of another one."""
    [arrived] = collectives.receive([tf.TensorSpec(like.shape, like.dtype)], source, tag=tag)
    return arrived


def send_receive(collectives: Collectives, tensor: tf.Tensor, partner: int, name: str) -> tf.Tensor:
    """Sends a vector to a partner, which does the same, and returns the partner's; n sent.

    An engine with a native all-to-all also gathers in one message, in both directions at the same time, while two messages
    between two ranks would follow each other. On others, a gather is preceded by a message with the numbers of rows.
    """
    if not collectives.wire.native_all_to_all:
        collectives.send([tensor], partner, tag=name)
        return receive(collectives, tensor, partner, name)
    pair = collectives.group(sorted((collectives.static_rank, partner)))
    [both] = pair.all_gather([tensor], name=name)
    size = tensor.shape[0]
    return tf.ensure_shape(both[:size] if pair.static_rank else both[size:], tensor.shape)
