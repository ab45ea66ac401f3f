"""Prediction: each replica computes its rows, and every process gets all outputs in the order of the rows."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batches import Dealt, with_any_rows
from tfdist.errors import InputError
from tfdist.stock.gathering import gathered
from tfdist.strategy import HasCollectives


def predicting(model: keras.Model, strategy: HasCollectives) -> Callable[[Any], Any]:
    """Returns a function from what `Strategy.run` takes for a `Dealt` to the outputs for all rows of the global batch."""

    def replica_function(dealt: Dealt) -> Any:
        outputs = model.predict_step(with_any_rows(dealt).batch)
        for output in tf.nest.flatten(outputs):
            if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
                raise InputError(
                    "Predictions of replicas are put together by rows, so each output is a dense tensor of rows. Received: "
                    f"{'a scalar' if isinstance(output, tf.Tensor) else type(output).__name__}. Call the model itself."
                )
        return gathered(outputs, strategy.collectives)

    @tf.function(autograph=False, reduce_retracing=True)
    def predict(dealt: Any) -> Any:
        outputs = strategy.run(replica_function, dealt)
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return predict
