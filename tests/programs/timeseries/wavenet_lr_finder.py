"""Forecasting with dilated causal convolutions as in WaveNet; a range test finds the learning rate first."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(55)

WINDOW = 24
BATCH_SIZE = 32


class LRFinder(keras.callbacks.Callback):
    """Raises the learning rate after every batch, and puts the weights back at the end."""

    def __init__(self, min_lr=1e-4, max_lr=1.0, steps=30, beta=0.9):
        super().__init__()
        self.min_lr, self.max_lr, self.steps, self.beta = min_lr, max_lr, steps, beta
        self.lrs, self.losses = [], []

    def on_train_begin(self, logs=None):
        self.weights = self.model.get_weights()
        self.step, self.average, self.best = 0, 0.0, np.inf
        self.model.optimizer.learning_rate = self.min_lr

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        # `logs` holds the mean since the epoch began; this is the loss of one batch.
        mean = logs["loss"]
        loss = mean * (batch + 1) - (self.previous * batch if batch else 0.0)
        self.previous = mean
        self.average = self.beta * self.average + (1 - self.beta) * loss
        smoothed = self.average / (1 - self.beta**self.step)
        self.lrs.append(float(self.model.optimizer.learning_rate))
        self.losses.append(float(smoothed))
        self.best = min(self.best, smoothed)
        if self.step >= self.steps or (self.step > 5 and smoothed > 4 * self.best):
            self.model.stop_training = True
            return
        self.model.optimizer.learning_rate = self.min_lr * (self.max_lr / self.min_lr) ** (self.step / self.steps)

    def on_train_end(self, logs=None):
        self.model.set_weights(self.weights)

    def suggestion(self):
        return self.lrs[int(np.argmin(self.losses))] / 10


def residual_block(x, filters, dilation_rate):
    tanh = layers.Conv1D(filters, 2, padding="causal", dilation_rate=dilation_rate, activation="tanh")(x)
    gate = layers.Conv1D(filters, 2, padding="causal", dilation_rate=dilation_rate, activation="sigmoid")(x)
    z = layers.Multiply()([tanh, gate])
    skip = layers.Conv1D(filters, 1)(z)
    return layers.Add()([x, skip]), skip


def build_wavenet(filters=8, dilations=(1, 2, 4, 8)):
    inputs = layers.Input((WINDOW, 1))
    x = layers.Conv1D(filters, 1, padding="causal")(inputs)
    skips = []
    for rate in dilations:
        x, skip = residual_block(x, filters, rate)
        skips.append(skip)
    x = layers.Activation("relu")(layers.Add()(skips))
    x = layers.Conv1D(filters, 1, activation="relu")(x)
    x = layers.Conv1D(1, 1)(x)
    return keras.Model(inputs, layers.Lambda(lambda t: t[:, -1, :], output_shape=(1,))(x))


# Sales: a trend, the week, the month, and noise
time = np.arange(500, dtype="float32")
series = 0.002 * time + np.sin(2 * np.pi * time / 7) + 0.5 * np.cos(2 * np.pi * time / 30)
series += np.random.normal(0, 0.1, len(time))
split = 380
mean, std = series[:split].mean(), series[:split].std()
series = ((series - mean) / std).astype("float32")


def windowed_dataset(series, shuffle):
    return keras.utils.timeseries_dataset_from_array(
        series[:-WINDOW, None], series[WINDOW:, None], WINDOW, batch_size=BATCH_SIZE, shuffle=shuffle, seed=9
    )


train_ds = windowed_dataset(series[:split], True)
val_ds = windowed_dataset(series[split - WINDOW :], False)

model = build_wavenet()
model.compile(loss=keras.losses.Huber(), optimizer=keras.optimizers.Adam())
finder = LRFinder()
model.fit(train_ds, epochs=4, callbacks=[finder], verbose=0)
learning_rate = finder.suggestion()
print("range test:", [f"{lr:.1e}: {loss:.3f}" for lr, loss in list(zip(finder.lrs, finder.losses))[::4]])

model.compile(loss=keras.losses.Huber(), optimizer=keras.optimizers.Adam(learning_rate), metrics=["mae", "mse"])
history = model.fit(train_ds, validation_data=val_ds, epochs=3, verbose=2)

forecast = model.predict(val_ds, verbose=0)[:, 0]
actual = np.concatenate([y for _, y in val_ds])[:, 0]
print("learning rate:", learning_rate)
print("loss:", history.history["loss"], "validation:", history.history["val_loss"])
print("MAE of the forecast:", float(np.abs(forecast - actual).mean()), "naive:", float(np.abs(np.diff(actual)).mean()))
