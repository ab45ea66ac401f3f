"""The side `dtensor`: a Keras model on DTensor as its users write it, without this library.

    python benchmarks/dtensor.py [--layout=data|model] ...

On a mesh of 2 x 2 logical devices the batch lies over pairs; with `--layout=model` heads and inner widths lie over the two of
a pair, as in Megatron.
"""

import argparse
import re

import keras
import stopwatch
import tensorflow as tf
from keras.src.backend.common.name_scope import current_path
from tensorflow.experimental import dtensor
from workload import LEARNING_RATE, WORKLOADS, arrays

from tfdist import models

DEVICES = 4
# Which dim of a variable lies over `model`, by the end of its path.
SPLIT = (
    (r"(query|key|value)/kernel", 1),
    (r"(query|key|value)/bias", 0),
    (r"attention_output/kernel", 0),
    (r"ffn_in/kernel", 1),
    (r"ffn_in/bias", 0),
    (r"ffn_out/kernel", 0),
)


def main(arguments: argparse.Namespace) -> None:
    """Makes the mesh, the model and the step, and measures it."""
    [host] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    mesh = dtensor.create_mesh([("data", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(DEVICES)])
    split = SPLIT if arguments.layout == "model" else ()

    def creator(next_creator: object, **given: object) -> tf.Variable:
        value = given["initial_value"]
        value = tf.convert_to_tensor(value() if callable(value) else value)
        axes = [dtensor.UNSHARDED] * value.shape.rank
        path = f"{current_path()}/{given['name']}"
        for pattern, dim in split:
            if re.search(f"{pattern}$", path):
                axes[dim] = "model"
        laid = dtensor.relayout(
            dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.shape.rank)), dtensor.Layout(axes, mesh)
        )
        return dtensor.DVariable(laid, name=given["name"])

    workload = WORKLOADS[arguments.workload]
    keras.utils.set_random_seed(0)
    with tf.variable_creator_scope(creator):
        model = models.build(workload.model, workload.shape, workload.classes)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    rows = [dtensor.Layout(["data", *[dtensor.UNSHARDED] * (1 if workload.tokens else n)], mesh) for n in (1, 0)]
    x, y = (
        dtensor.relayout(dtensor.copy_to_mesh(tf.constant(array), dtensor.Layout.replicated(mesh, array.ndim)), layout)
        for array, layout in zip(arrays(arguments.workload, workload.rows * DEVICES, 100), rows, strict=True)
    )
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    stopwatch.report(*stopwatch.from_arguments(arguments).measure(step, lambda loss: float(loss.numpy())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("data", "model"), default="model")
    stopwatch.add_arguments(parser)
    main(parser.parse_args())
