"""Temperature forecasting from past weather with an LSTM."""

import keras
import numpy as np

keras.utils.set_random_seed(812)

# Hourly measurements: pressure, temperature, humidity, wind.
feature_keys = ["p (mbar)", "T (degC)", "rh (%)", "wv (m/s)"]
hours = np.arange(330)
temperature = 10 + 8 * np.sin(2 * np.pi * hours / 24) + np.random.normal(scale=0.5, size=len(hours))
features = np.stack(
    [
        990 + np.cumsum(np.random.normal(scale=0.3, size=len(hours))),
        temperature,
        70 - 1.5 * temperature + np.random.normal(size=len(hours)),
        np.abs(np.random.normal(scale=3.0, size=len(hours))),
    ],
    axis=-1,
)

split_fraction = 0.7
train_split = int(split_fraction * len(features))
step = 2

past = 24
future = 6
learning_rate = 0.001
batch_size = 32
epochs = 3


def normalize(data, train_split):
    data_mean = data[:train_split].mean(axis=0)
    data_std = data[:train_split].std(axis=0)
    return (data - data_mean) / data_std


print("The selected parameters are:", ", ".join(feature_keys))
features = normalize(features, train_split)
train_data = features[:train_split]
val_data = features[train_split:]

start = past + future
end = start + train_split
x_train = train_data
y_train = features[start:end, [1]]
sequence_length = int(past / step)

dataset_train = keras.utils.timeseries_dataset_from_array(
    x_train,
    y_train,
    sequence_length=sequence_length,
    sampling_rate=step,
    batch_size=batch_size,
)

x_end = len(val_data) - past - future
label_start = train_split + past + future
x_val = val_data[:x_end]
y_val = features[label_start:, [1]]

dataset_val = keras.utils.timeseries_dataset_from_array(
    x_val,
    y_val,
    sequence_length=sequence_length,
    sampling_rate=step,
    batch_size=batch_size,
)

for batch in dataset_train.take(1):
    inputs, targets = batch
print("Input shape:", inputs.numpy().shape)
print("Target shape:", targets.numpy().shape)

inputs = keras.layers.Input(shape=(inputs.shape[1], inputs.shape[2]))
lstm_out = keras.layers.LSTM(16)(inputs)
outputs = keras.layers.Dense(1)(lstm_out)

model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=learning_rate), loss="mse")
model.summary()

path_checkpoint = "model_checkpoint.weights.h5"
es_callback = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
modelckpt_callback = keras.callbacks.ModelCheckpoint(
    monitor="val_loss",
    filepath=path_checkpoint,
    verbose=1,
    save_weights_only=True,
    save_best_only=True,
)

history = model.fit(
    dataset_train,
    epochs=epochs,
    validation_data=dataset_val,
    callbacks=[es_callback, modelckpt_callback],
)
print("loss:", history.history["loss"])
print("val_loss:", history.history["val_loss"])

for x, y in dataset_val.take(2):
    print("True future:", y[0].numpy(), "model prediction:", model.predict(x)[0])
