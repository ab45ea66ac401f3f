"""Gradients accumulated over several batches in a train_step."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(123)


class CustomTrainStep(keras.Model):
    """Adds up the gradients of `n_gradients` batches, and only then updates the weights."""

    def __init__(self, n_gradients, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_gradients = tf.constant(n_gradients, dtype=tf.int32)
        self.n_acum_step = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.gradient_accumulation = [
            tf.Variable(tf.zeros(v.shape, dtype=v.dtype), trainable=False) for v in self.trainable_variables
        ]

    def train_step(self, data):
        self.n_acum_step.assign_add(1)

        x, y = data
        # Gradient Tape
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        # Calculate batch gradients
        gradients = tape.gradient(loss, self.trainable_variables)
        # Accumulate batch gradients
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign_add(gradients[i] / tf.cast(self.n_gradients, gradients[i].dtype))

        # If n_acum_step reach the n_gradients then we apply accumulated gradients to update the variables
        # otherwise do nothing
        tf.cond(tf.equal(self.n_acum_step, self.n_gradients), self.apply_accu_gradients, lambda: None)

        # update metrics
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def apply_accu_gradients(self):
        # apply accumulated gradients
        self.optimizer.apply_gradients(zip(self.gradient_accumulation, self.trainable_variables))

        # reset
        self.n_acum_step.assign(0)
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign(tf.zeros_like(self.gradient_accumulation[i]))


# data
x = np.random.normal(size=(260, 10)).astype(np.float32)
target = np.argmax(x[:, :3] + 0.5 * x[:, 3:6], axis=1)
x_train, y_train = x[:210], tf.one_hot(target[:210], 3)
x_test, y_test = x[210:], tf.one_hot(target[210:], 3)

# bind all
input = keras.Input(shape=(10,))
base_maps = keras.layers.Dense(24, activation="relu")(input)
base_maps = keras.layers.Dropout(0.1)(base_maps)
base_maps = keras.layers.Dense(units=3, activation="softmax", name="primary")(base_maps)
custom_model = CustomTrainStep(n_gradients=4, inputs=[input], outputs=[base_maps])
custom_model.compile(
    loss=keras.losses.CategoricalCrossentropy(),
    metrics=["accuracy"],
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
)
# 14 batches an epoch: the second epoch begins with two batches accumulated.
history = custom_model.fit(x_train, y_train, batch_size=16, epochs=3, verbose=2)
print("evaluated:", custom_model.evaluate(x_test, y_test, verbose=0))
