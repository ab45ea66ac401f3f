"""Time series forecasting of the weather with windowed data and several kinds of models."""

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(812)

columns = ["T (degC)", "p (mbar)", "Day sin", "Day cos"]
hours = np.arange(240)
day_sin, day_cos = np.sin(hours * (2 * np.pi / 24)), np.cos(hours * (2 * np.pi / 24))
temperature = 10 + 5 * day_sin + np.random.normal(0, 0.5, size=240)
pressure = 1000 + np.cumsum(np.random.normal(0, 0.3, size=240))
data = np.stack([temperature, pressure, day_sin, day_cos], axis=1)

column_indices = {name: i for i, name in enumerate(columns)}
n = len(data)
train_df, val_df, test_df = data[: int(n * 0.7)], data[int(n * 0.7) : int(n * 0.85)], data[int(n * 0.85) :]
num_features = data.shape[1]
train_mean, train_std = train_df.mean(axis=0), train_df.std(axis=0)
train_df, val_df, test_df = ((part - train_mean) / train_std for part in (train_df, val_df, test_df))


class WindowGenerator:
    def __init__(self, input_width, label_width, shift, label_columns=None):
        self.train_df, self.val_df, self.test_df = train_df, val_df, test_df
        self.label_columns = label_columns
        self.input_width = input_width
        self.label_width = label_width
        self.shift = shift
        self.total_window_size = input_width + shift
        self.input_slice = slice(0, input_width)
        self.label_start = self.total_window_size - self.label_width
        self.labels_slice = slice(self.label_start, None)

    def split_window(self, features):
        inputs = features[:, self.input_slice, :]
        labels = features[:, self.labels_slice, :]
        if self.label_columns is not None:
            labels = tf.stack([labels[:, :, column_indices[name]] for name in self.label_columns], axis=-1)
        # Slicing doesn't preserve static shape information, so set the shapes manually.
        inputs.set_shape([None, self.input_width, None])
        labels.set_shape([None, self.label_width, None])
        return inputs, labels

    def make_dataset(self, data):
        data = np.array(data, dtype=np.float32)
        ds = tf.keras.utils.timeseries_dataset_from_array(
            data=data,
            targets=None,
            sequence_length=self.total_window_size,
            sequence_stride=1,
            shuffle=True,
            batch_size=32,
        )
        return ds.map(self.split_window)

    @property
    def train(self):
        return self.make_dataset(self.train_df)

    @property
    def val(self):
        return self.make_dataset(self.val_df)

    @property
    def test(self):
        return self.make_dataset(self.test_df)


class Baseline(tf.keras.Model):
    def __init__(self, label_index=None):
        super().__init__()
        self.label_index = label_index

    def call(self, inputs):
        if self.label_index is None:
            return inputs
        result = inputs[:, :, self.label_index]
        return result[:, :, tf.newaxis]


MAX_EPOCHS = 2


def compile_and_fit(model, window, patience=2):
    early_stopping = tf.keras.callbacks.EarlyStopping(monitor="val_loss", patience=patience, mode="min")
    model.compile(
        loss=tf.keras.losses.MeanSquaredError(),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=[tf.keras.metrics.MeanAbsoluteError()],
    )
    return model.fit(window.train, epochs=MAX_EPOCHS, validation_data=window.val, callbacks=[early_stopping])


wide_window = WindowGenerator(input_width=12, label_width=12, shift=1, label_columns=["T (degC)"])
conv_window = WindowGenerator(input_width=3, label_width=1, shift=1, label_columns=["T (degC)"])

baseline = Baseline(label_index=column_indices["T (degC)"])
baseline.compile(loss=tf.keras.losses.MeanSquaredError(), metrics=[tf.keras.metrics.MeanAbsoluteError()])
baseline.evaluate(wide_window.test, verbose=0, return_dict=True)

linear = tf.keras.Sequential([tf.keras.layers.Dense(units=1)])
dense = tf.keras.Sequential([tf.keras.layers.Dense(units=8, activation="relu"), tf.keras.layers.Dense(units=1)])
conv_model = tf.keras.Sequential(
    [tf.keras.layers.Conv1D(filters=8, kernel_size=(3,), activation="relu"), tf.keras.layers.Dense(units=1)]
)
lstm_model = tf.keras.Sequential([tf.keras.layers.LSTM(8, return_sequences=True), tf.keras.layers.Dense(units=1)])


class FeedBack(tf.keras.Model):
    def __init__(self, units, out_steps):
        super().__init__()
        self.out_steps = out_steps
        self.units = units
        self.lstm_cell = tf.keras.layers.LSTMCell(units)
        self.lstm_rnn = tf.keras.layers.RNN(self.lstm_cell, return_state=True)
        self.dense = tf.keras.layers.Dense(num_features)

    def warmup(self, inputs):
        x, *state = self.lstm_rnn(inputs)
        prediction = self.dense(x)
        return prediction, state

    def call(self, inputs, training=None):
        predictions = []
        prediction, state = self.warmup(inputs)
        predictions.append(prediction)
        for _ in range(1, self.out_steps):
            x, state = self.lstm_cell(prediction, states=state, training=training)
            prediction = self.dense(x)
            predictions.append(prediction)
        predictions = tf.stack(predictions)
        return tf.transpose(predictions, [1, 0, 2])


multi_window = WindowGenerator(input_width=10, label_width=3, shift=3)
candidates = [
    (linear, wide_window),
    (dense, wide_window),
    (conv_model, conv_window),
    (lstm_model, wide_window),
    (FeedBack(units=8, out_steps=3), multi_window),
]
for model, window in candidates:
    compile_and_fit(model, window)
    model.evaluate(window.val, return_dict=True)
    model.evaluate(window.test, verbose=0, return_dict=True)
