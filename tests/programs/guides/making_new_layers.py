"""New layers made by subclassing Layer: weights, nesting, losses added in call, and configuration."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

keras.utils.set_random_seed(812)


class Linear(keras.layers.Layer):
    def __init__(self, units=32, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(
            shape=(input_shape[-1], self.units),
            initializer="random_normal",
            trainable=True,
        )
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self):
        config = super().get_config()
        config.update({"units": self.units})
        return config


# A layer that creates an activity regularization loss
class ActivityRegularizationLayer(keras.layers.Layer):
    def __init__(self, rate=1e-2, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(inputs))
        return inputs


class OuterLayer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.activity_reg = ActivityRegularizationLayer(1e-2)

    def call(self, inputs):
        return self.activity_reg(inputs)


class OuterLayerWithKernelRegularizer(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.l2(1e-3))

    def call(self, inputs):
        return self.dense(inputs)


layer = OuterLayer()
_ = layer(ops.ones((1, 1)))
assert len(layer.losses) == 1  # We created one loss value

# A serializable layer is recreated from its configuration.
layer = Linear(64, name="again")
new_layer = Linear.from_config(layer.get_config())
print(new_layer.get_config()["units"])


class MLPBlock(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.linear_1 = Linear(16)
        self.linear_2 = Linear(16)
        self.regularizer = OuterLayer()
        self.regularized = OuterLayerWithKernelRegularizer()
        self.linear_3 = Linear(1)

    def call(self, inputs):
        x = ops.relu(self.linear_1(inputs))
        x = self.regularizer(ops.relu(self.linear_2(x)))
        return self.linear_3(self.regularized(x))


# These losses are taken into account by `fit()`, if there is a loss or not.
inputs = keras.Input(shape=(5,))
model = keras.Model(inputs, MLPBlock()(inputs))
model.compile(optimizer="adam", loss="mse")
x_train, y_train = np.random.random((150, 5)), np.random.random((150, 1))
history = model.fit(x_train, y_train, epochs=2, batch_size=16)
print("mse and regularization:", history.history["loss"])

model.compile(optimizer="adam")
history = model.fit(x_train, y_train, epochs=1, batch_size=16)
print("regularization alone:", history.history["loss"])

# In a loop of one's own they are added by hand.
optimizer = keras.optimizers.SGD(learning_rate=1e-2)
loss_fn = keras.losses.MeanSquaredError()
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(32)
for x_batch, y_batch in train_dataset:
    with tf.GradientTape() as tape:
        loss_value = loss_fn(y_batch, model(x_batch))
        loss_value += sum(model.losses)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply(grads, model.trainable_weights)
print("loss of the last batch:", float(loss_value))
