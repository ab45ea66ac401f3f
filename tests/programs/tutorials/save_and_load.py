"""Saving and loading models: checkpoints during training, manually saved weights, and complete models."""

import os

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(812)

patterns = np.random.uniform(0, 1, size=(10, 64))
train_labels = np.random.randint(0, 10, size=200)
test_labels = np.random.randint(0, 10, size=50)
train_images = patterns[train_labels] + 0.2 * np.random.uniform(0, 1, size=(200, 64))
test_images = patterns[test_labels] + 0.2 * np.random.uniform(0, 1, size=(50, 64))


# Define a simple sequential model
def create_model():
    model = tf.keras.Sequential(
        [
            keras.layers.Input(shape=(64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )

    model.compile(
        optimizer="adam",
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
    )

    return model


# Create a basic model instance, and display its architecture
model = create_model()
model.summary()

checkpoint_path = "training_1/cp.weights.h5"
checkpoint_dir = os.path.dirname(checkpoint_path)

# Create a callback that saves the model's weights
cp_callback = tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_path, save_weights_only=True, verbose=1)

# Train the model with the new callback
history = model.fit(
    train_images, train_labels, epochs=3, validation_data=(test_images, test_labels), callbacks=[cp_callback]
)
print(history.history)
print(os.listdir(checkpoint_dir))

# Create a new, untrained model and evaluate it
model = create_model()
loss, acc = model.evaluate(test_images, test_labels, verbose=2)
print(f"Untrained model, accuracy: {100 * acc:5.2f}%")

# Loads the weights, and re-evaluate the model
model.load_weights(checkpoint_path)
loss, acc = model.evaluate(test_images, test_labels, verbose=2)
print(f"Restored model, accuracy: {100 * acc:5.2f}%, loss {loss:.6f}")

# Include the epoch in the file name
checkpoint_path = "training_2/cp-{epoch:04d}.weights.h5"
checkpoint_dir = os.path.dirname(checkpoint_path)

batch_size = 64

# Calculate the number of batches per epoch
n_batches = len(train_images) / batch_size
n_batches = int(np.ceil(n_batches))  # round up the number of batches to the nearest whole integer

# Create a callback that saves the model's weights every 5 epochs
cp_callback = tf.keras.callbacks.ModelCheckpoint(
    filepath=checkpoint_path, verbose=1, save_weights_only=True, save_freq=5 * n_batches
)

# Create a new model instance, save its weights as they are, and train it
model = create_model()
os.makedirs(checkpoint_dir, exist_ok=True)
model.save_weights(checkpoint_path.format(epoch=0))
model.fit(
    train_images,
    train_labels,
    epochs=10,
    batch_size=batch_size,
    callbacks=[cp_callback],
    validation_data=(test_images, test_labels),
    verbose=0,
)

checkpoints = sorted(os.listdir(checkpoint_dir))
print(checkpoints)
latest = os.path.join(checkpoint_dir, checkpoints[-1])
model = create_model()
model.load_weights(latest)
loss, acc = model.evaluate(test_images, test_labels, verbose=2)
print(f"Restored model, accuracy: {100 * acc:5.2f}%, loss {loss:.6f}")

# Save the entire model as a `.keras` zip archive, and load it again.
model = create_model()
model.fit(train_images, train_labels, epochs=2)
model.save("my_model.keras")
new_model = tf.keras.models.load_model("my_model.keras")
new_model.summary()
loss, acc = new_model.evaluate(test_images, test_labels, verbose=2)
print(f"Restored model, accuracy: {100 * acc:5.2f}%, loss {loss:.6f}")
print(new_model.predict(test_images).shape, np.abs(new_model.predict(test_images) - model.predict(test_images)).max())
