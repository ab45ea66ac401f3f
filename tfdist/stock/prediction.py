"""Prediction: each replica computes its rows, and every process gets all outputs in the order of the rows."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batches import Dealt
from tfdist.errors import InputError
from tfdist.strategy import HasCollectives

# What stands in for a dtype that an engine does not gather; each holds all of its values.
_CARRIERS = {tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.bfloat16: tf.float32}


def predicting(model: keras.Model, strategy: HasCollectives) -> Callable[[Any], Any]:
    """Returns a function from what `Strategy.run` takes for a `Dealt` to the outputs for all rows of the global batch."""

    def replica_function(dealt: Dealt) -> Any:
        outputs = model.predict_step(dealt.batch)
        for output in tf.nest.flatten(outputs):
            if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
                raise InputError(
                    "Predictions of replicas are put together by rows, so each output is a dense tensor of rows. Received: "
                    f"{'a scalar' if isinstance(output, tf.Tensor) else type(output).__name__}. Call the model itself."
                )
        whole = _gathered(tf.nest.flatten(outputs), strategy)
        return tf.nest.pack_sequence_as(outputs, whole)

    @tf.function(autograph=False, reduce_retracing=True)
    def predict(dealt: Any) -> Any:
        outputs = strategy.run(replica_function, dealt)
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return predict


def _gathered(tensors: Sequence[tf.Tensor], strategy: HasCollectives) -> list[tf.Tensor]:
    gathers = strategy.collectives.wire.gathers
    carried = [tf.cast(t, t.dtype if t.dtype in gathers else _CARRIERS.get(t.dtype, t.dtype)) for t in tensors]
    whole = strategy.collectives.all_gather(carried, name="predictions")
    return [tf.cast(value, tensor.dtype) for value, tensor in zip(whole, tensors, strict=True)]
