"""TensorFlow's RPC, which parameter servers do not use, and Keras's serialization of optimizers, which travel to them."""

import keras
import pytest
import tensorflow as tf

from tfdist.coordination.job_token import free_port


def test_tensorflows_rpc_has_messages_of_at_most_4_mib_and_no_authentication():
    """`tf.distribute.experimental.rpc`: the limit cannot be raised, and whoever reaches the port may call."""
    address = f"127.0.0.1:{free_port()}"
    server = tf.distribute.experimental.rpc.Server.create("grpc", address)
    echo = tf.function(lambda x: x, input_signature=[tf.TensorSpec([None], tf.float32)])
    server.register("echo", echo)
    server.start()
    client = tf.distribute.experimental.rpc.Client.create("grpc", address, "client")
    assert client.echo_blocking(tf.zeros([1_048_000])).shape == [1_048_000]
    with pytest.raises(tf.errors.ResourceExhaustedError):
        client.echo_blocking(tf.zeros([1_060_000]))


@pytest.mark.parametrize(("name", "is_restored"), [("SGD", True), ("Lamb", False)])
def test_keras_does_not_deserialize_each_of_its_optimizers_by_its_own_function(name, is_restored):
    optimizer = getattr(keras.optimizers, name)(0.1)
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(restored, keras.Optimizer) == is_restored
    saved = keras.saving.serialize_keras_object(optimizer)
    assert isinstance(keras.saving.deserialize_keras_object(saved), type(optimizer))
