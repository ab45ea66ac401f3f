"""An exponential average of the weights, kept by a callback, with a cyclical learning rate."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(3)


class CyclicalLearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """Triangles, each half as high as the one before (`triangular2`)."""

    def __init__(self, initial_learning_rate, maximal_learning_rate, step_size):
        self.initial_learning_rate = initial_learning_rate
        self.maximal_learning_rate = maximal_learning_rate
        self.step_size = step_size

    def __call__(self, step):
        step = ops.cast(step, keras.config.floatx())
        cycle = ops.floor(1 + step / (2 * self.step_size))
        x = ops.abs(step / self.step_size - 2 * cycle + 1)
        scale = 1 / (2.0 ** (cycle - 1))
        return self.initial_learning_rate + (self.maximal_learning_rate - self.initial_learning_rate) * scale * (
            ops.maximum(0.0, 1 - x)
        )


class ExponentialMovingAverage(keras.callbacks.Callback):
    """Keeps shadow weights after each batch; validation and the end of the training use them."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.decay = decay

    def on_train_begin(self, logs=None):
        self.shadow = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        for i, weight in enumerate(self.model.get_weights()):
            self.shadow[i] = self.decay * self.shadow[i] + (1 - self.decay) * weight

    def on_test_begin(self, logs=None):
        self.backup = self.model.get_weights()
        self.model.set_weights(self.shadow)

    def on_test_end(self, logs=None):
        self.model.set_weights(self.backup)

    def on_train_end(self, logs=None):
        self.model.set_weights(self.shadow)


def build_model():
    model = keras.models.Sequential()
    model.add(keras.layers.Input(shape=(10, 10, 1)))
    model.add(keras.layers.Conv2D(6, (3, 3), activation="relu"))
    model.add(keras.layers.MaxPooling2D((2, 2)))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dropout(0.2))
    model.add(keras.layers.Dense(5, activation="softmax"))
    return model


labels = np.random.randint(0, 5, 330)
images = np.random.random((330, 10, 10, 1)).astype("float32")
for image, label in zip(images, labels):
    image[:, 2 * label : 2 * label + 2] += 0.5
y = keras.utils.to_categorical(labels, num_classes=5)
x_train, y_train, x_test, y_test = images[:270], y[:270], images[270:], y[270:]
steps_per_epoch = int(np.ceil(len(x_train) / 32))

for callback in (None, ExponentialMovingAverage()):
    keras.utils.set_random_seed(3)
    model = build_model()
    schedule = CyclicalLearningRate(1e-2, 2e-1, step_size=steps_per_epoch)
    model.compile(
        loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9),
        metrics=["accuracy"],
    )
    model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=3,
        validation_data=(x_test, y_test),
        callbacks=[callback] if callback else [],
        verbose=0,
    )
    model.evaluate(x_test, y_test, batch_size=25, verbose=0)
