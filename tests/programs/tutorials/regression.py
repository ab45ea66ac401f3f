"""Regression of the fuel efficiency of cars, with linear and with deep models."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(812)

# Make NumPy printouts easier to read.
np.set_printoptions(precision=3, suppress=True)

column_names = ["Cylinders", "Displacement", "Horsepower", "Weight", "Acceleration", "Model Year"]
count = 240
cylinders = np.random.choice([4.0, 6.0, 8.0], size=count)
displacement = 45 * cylinders + np.random.normal(0, 20, size=count)
horsepower = 18 * cylinders + np.random.normal(0, 12, size=count)
weight = 1500 + 300 * cylinders + np.random.normal(0, 150, size=count)
acceleration = 25 - 1.2 * cylinders + np.random.normal(0, 1, size=count)
model_year = np.random.randint(70, 83, size=count).astype("float64")
features = np.stack([cylinders, displacement, horsepower, weight, acceleration, model_year], axis=1)
labels = 50 - 0.008 * weight - 0.03 * horsepower + 0.3 * (model_year - 76) + np.random.normal(0, 1, size=count)

# One-hot columns of the origin
origin = np.eye(3)[np.random.randint(3, size=count)]
features = np.concatenate([features, origin], axis=1).astype("float32")

# Split the data into training and test sets
order = np.random.permutation(count)
train_rows, test_rows = order[: int(0.8 * count)], order[int(0.8 * count) :]
train_features, test_features = features[train_rows], features[test_rows]
train_labels, test_labels = labels[train_rows], labels[test_rows]

# The Normalization layer
normalizer = tf.keras.layers.Normalization(axis=-1)
normalizer.adapt(np.array(train_features))
print(normalizer.mean.numpy())

first = np.array(train_features[:1])
print("First example:", first)
print("Normalized:", normalizer(first).numpy())

test_results = {}
histories = {}

# Linear regression with one variable
horsepower_column = column_names.index("Horsepower")
train_horsepower, test_horsepower = train_features[:, horsepower_column], test_features[:, horsepower_column]
horsepower_normalizer = layers.Normalization(input_shape=[1], axis=None)
horsepower_normalizer.adapt(train_horsepower)

horsepower_model = tf.keras.Sequential([horsepower_normalizer, layers.Dense(units=1)])
horsepower_model.summary()
print(horsepower_model.predict(train_horsepower[:10]))
horsepower_model.compile(optimizer=tf.keras.optimizers.Adam(learning_rate=0.1), loss="mean_absolute_error")

histories["horsepower_model"] = horsepower_model.fit(
    train_horsepower,
    train_labels,
    epochs=3,
    # Suppress logging.
    verbose=0,
    # Calculate validation results on 20% of the training data.
    validation_split=0.2,
)
test_results["horsepower_model"] = horsepower_model.evaluate(test_horsepower, test_labels, verbose=0)
x = tf.linspace(0.0, 250, 11)
print(horsepower_model.predict(x).ravel())

# Linear regression with multiple inputs
linear_model = tf.keras.Sequential([normalizer, layers.Dense(units=1)])
linear_model.predict(train_features[:10])
print(linear_model.layers[1].kernel.shape)
linear_model.compile(optimizer=tf.keras.optimizers.Adam(learning_rate=0.1), loss="mean_absolute_error")
histories["linear_model"] = linear_model.fit(train_features, train_labels, epochs=3, verbose=0, validation_split=0.2)
test_results["linear_model"] = linear_model.evaluate(test_features, test_labels, verbose=0)


# Regression with a deep neural network
def build_and_compile_model(norm):
    model = keras.Sequential(
        [norm, layers.Dense(16, activation="relu"), layers.Dense(16, activation="relu"), layers.Dense(1)]
    )
    model.compile(loss="mean_absolute_error", optimizer=tf.keras.optimizers.Adam(0.001))
    return model


dnn_model = build_and_compile_model(normalizer)
dnn_model.summary()
histories["dnn_model"] = dnn_model.fit(train_features, train_labels, validation_split=0.2, verbose=0, epochs=3)
test_results["dnn_model"] = dnn_model.evaluate(test_features, test_labels, verbose=0)

for name, history in histories.items():
    print(name, history.history)
print("Test results:", test_results)

# Make predictions
test_predictions = dnn_model.predict(test_features).flatten()
error = test_predictions - test_labels
print("Mean error:", error.mean())

dnn_model.save("dnn_model.keras")
reloaded = tf.keras.models.load_model("dnn_model.keras")
test_results["reloaded"] = reloaded.evaluate(test_features, test_labels, verbose=0)
print(test_results["reloaded"])
