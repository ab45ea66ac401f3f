"""K-fold cross-validation of a small regression network on prices of houses."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)

# Thirteen features of each district, of different ranges, and a price
scales = np.random.uniform(0.1, 50.0, size=13)
train_data = np.random.normal(size=(150, 13)) * scales
weights = np.random.normal(size=13)
train_targets = 20 + 5 * np.tanh((train_data / scales) @ weights / 3) + np.random.normal(size=150)
test_data = np.random.normal(size=(40, 13)) * scales
test_targets = 20 + 5 * np.tanh((test_data / scales) @ weights / 3)

# Normalize with what the training data say
mean = train_data.mean(axis=0)
train_data -= mean
std = train_data.std(axis=0)
train_data /= std
test_data -= mean
test_data /= std


def build_model():
    model = keras.Sequential(
        [
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer="rmsprop", loss="mse", metrics=["mae"])
    return model


k = 3
num_val_samples = len(train_data) // k
num_epochs = 3
all_scores = []
all_mae_histories = []
for i in range(k):
    print(f"Processing fold #{i}")
    # Prepares the validation data: data from partition #i
    val_data = train_data[i * num_val_samples : (i + 1) * num_val_samples]
    val_targets = train_targets[i * num_val_samples : (i + 1) * num_val_samples]
    # Prepares the training data: data from all other partitions
    partial_train_data = np.concatenate(
        [train_data[: i * num_val_samples], train_data[(i + 1) * num_val_samples :]],
        axis=0,
    )
    partial_train_targets = np.concatenate(
        [train_targets[: i * num_val_samples], train_targets[(i + 1) * num_val_samples :]],
        axis=0,
    )
    keras.backend.clear_session()
    model = build_model()
    history = model.fit(
        partial_train_data,
        partial_train_targets,
        validation_data=(val_data, val_targets),
        epochs=num_epochs,
        batch_size=16,
        verbose=0,
    )
    all_mae_histories.append(history.history["val_mae"])
    val_mse, val_mae = model.evaluate(val_data, val_targets, verbose=0)
    all_scores.append(val_mae)

print("scores:", all_scores, "mean:", np.mean(all_scores))
average_mae_history = [np.mean([x[i] for x in all_mae_histories]) for i in range(num_epochs)]
print("by epoch:", average_mae_history)

# The production model is trained on all of the data.
model = build_model()
model.fit(train_data, train_targets, epochs=num_epochs, batch_size=16, verbose=0)
test_mse_score, test_mae_score = model.evaluate(test_data, test_targets)
print("test:", test_mse_score, test_mae_score)
predictions = model.predict(test_data)
print("first price:", predictions[0])
