"""Training and evaluation with fit and evaluate: custom losses and metrics, data of several forms, schedules, TensorBoard."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(812)

# Preprocess the data (these are NumPy arrays)
x_train = np.random.randint(0, 256, (240, 64)).astype("float32") / 255
y_train = np.random.randint(0, 10, (240,)).astype("float32")
x_test = np.random.randint(0, 256, (60, 64)).astype("float32") / 255
y_test = np.random.randint(0, 10, (60,)).astype("float32")

# Reserve 50 samples for validation
x_val, y_val = x_train[-50:], y_train[-50:]
x_train, y_train = x_train[:-50], y_train[:-50]


def get_uncompiled_model():
    inputs = keras.Input(shape=(64,), name="digits")
    x = layers.Dense(16, activation="relu", name="dense_1")(inputs)
    x = layers.Dense(16, activation="relu", name="dense_2")(x)
    outputs = layers.Dense(10, activation="softmax", name="predictions")(x)
    return keras.Model(inputs=inputs, outputs=outputs)


def get_compiled_model():
    model = get_uncompiled_model()
    model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return model


model = get_compiled_model()
history = model.fit(x_train, y_train, batch_size=64, epochs=2, validation_data=(x_val, y_val))
print("test loss, test acc:", model.evaluate(x_test, y_test, batch_size=128))
print("predictions shape:", model.predict(x_test[:3]).shape)


# Custom losses: a function, and a class with a parameter
def custom_mean_squared_error(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class CustomMSE(keras.losses.Loss):
    def __init__(self, regularization_factor=0.1, name="custom_mse"):
        super().__init__(name=name)
        self.regularization_factor = regularization_factor

    def call(self, y_true, y_pred):
        mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
        reg = ops.mean(ops.square(0.5 - y_pred), axis=-1)
        return mse + reg * self.regularization_factor


y_train_one_hot = ops.one_hot(y_train, num_classes=10)
for loss in (custom_mean_squared_error, CustomMSE()):
    model = get_uncompiled_model()
    model.compile(optimizer=keras.optimizers.Adam(), loss=loss)
    print(model.fit(x_train, y_train_one_hot, batch_size=64, epochs=1).history)


# A custom metric
class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name="categorical_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
        values = ops.cast(values, self.dtype)
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, self.dtype)
            values = ops.multiply(values, sample_weight)
        self.true_positives.assign_add(ops.sum(values))

    def result(self):
        return self.true_positives

    def reset_state(self):
        # The state of the metric will be reset at the start of each epoch.
        self.true_positives.assign(0)


model = get_uncompiled_model()
lr_schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, decay_steps=5, decay_rate=0.96, staircase=True)
model.compile(
    optimizer=keras.optimizers.RMSprop(learning_rate=lr_schedule),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[CategoricalTruePositives()],
)
tensorboard = keras.callbacks.TensorBoard(log_dir="logs", histogram_freq=1, update_freq="epoch")
history = model.fit(x_train, y_train, batch_size=32, epochs=3, validation_split=0.2, callbacks=[tensorboard])


# A loss that is added in a layer
class ActivityRegularizationLayer(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.sum(inputs) * 0.001)
        return inputs  # Pass-through layer.


base = get_uncompiled_model()
model = keras.Sequential([*base.layers[:2], ActivityRegularizationLayer(), *base.layers[2:]])
model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy")
print(model.fit(x_train, y_train, batch_size=64, epochs=1).history)


# Data from a PyDataset
class ExamplePyDataset(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return int(np.ceil(len(self.x) / float(self.batch_size)))

    def __getitem__(self, idx):
        batch_x = self.x[idx * self.batch_size : (idx + 1) * self.batch_size]
        batch_y = self.y[idx * self.batch_size : (idx + 1) * self.batch_size]
        return batch_x, batch_y

    def on_epoch_end(self):
        order = np.random.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


model = get_compiled_model()
history = model.fit(ExamplePyDataset(x_train, y_train, batch_size=32), epochs=2, validation_data=(x_val, y_val))
print(history.history, model.evaluate(ExamplePyDataset(x_test, y_test, batch_size=25)))
