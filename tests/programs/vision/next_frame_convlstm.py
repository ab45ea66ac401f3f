"""Next-frame video prediction with convolutional LSTMs."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)


def moving_squares(num_movies=120, num_frames=9, size=10):
    """Movies of a small square which drifts over the picture and wraps around."""
    movies = np.zeros((num_movies, num_frames, size, size, 1))
    for i in range(num_movies):
        row, col = np.random.randint(0, size, size=2)
        dr, dc = np.random.randint(-1, 2, size=2)
        for t in range(num_frames):
            rows = np.arange(row + dr * t, row + dr * t + 3) % size
            cols = np.arange(col + dc * t, col + dc * t + 3) % size
            movies[i, t, rows[:, None], cols, 0] = 255
    return movies


dataset = moving_squares()

# Split into train and validation sets using indexing to optimize memory.
indexes = np.arange(dataset.shape[0])
np.random.shuffle(indexes)
train_index = indexes[: int(0.9 * dataset.shape[0])]
val_index = indexes[int(0.9 * dataset.shape[0]) :]
train_dataset = dataset[train_index]
val_dataset = dataset[val_index]

# Normalize the data to the 0-1 range.
train_dataset = train_dataset / 255
val_dataset = val_dataset / 255


# We'll define a helper function to shift the frames, where
# `x` is frames 0 to n - 1, and `y` is frames 1 to n.
def create_shifted_frames(data):
    x = data[:, 0 : data.shape[1] - 1, :, :]
    y = data[:, 1 : data.shape[1], :, :]
    return x, y


x_train, y_train = create_shifted_frames(train_dataset)
x_val, y_val = create_shifted_frames(val_dataset)
print("Training Dataset Shapes: " + str(x_train.shape) + ", " + str(y_train.shape))
print("Validation Dataset Shapes: " + str(x_val.shape) + ", " + str(y_val.shape))

# Construct the input layer with no definite frame size.
inp = layers.Input(shape=(None, *x_train.shape[2:]))

x = layers.ConvLSTM2D(filters=4, kernel_size=(3, 3), padding="same", return_sequences=True, activation="relu")(inp)
x = layers.BatchNormalization()(x)
x = layers.ConvLSTM2D(filters=4, kernel_size=(1, 1), padding="same", return_sequences=True, activation="relu")(x)
x = layers.Conv3D(filters=1, kernel_size=(3, 3, 3), activation="sigmoid", padding="same")(x)

model = keras.models.Model(inp, x)
model.compile(loss=keras.losses.binary_crossentropy, optimizer=keras.optimizers.Adam())

# Define some callbacks to improve training.
early_stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=10)
reduce_lr = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=0.05)

epochs = 3
batch_size = 16

history = model.fit(
    x_train,
    y_train,
    batch_size=batch_size,
    epochs=epochs,
    validation_data=(x_val, y_val),
    callbacks=[early_stopping, reduce_lr],
)
print("Validation loss:", history.history["val_loss"])
print("Learning rate:", history.history["learning_rate"])

# Select a random example from the validation dataset, and predict its last frames.
example = val_dataset[np.random.choice(range(len(val_dataset)), size=1)[0]]
frames = example[:5, ...]
original_frames = example[5:, ...]

for _ in range(4):
    # Extract the model's prediction and post-process it.
    new_prediction = model.predict(np.expand_dims(frames, axis=0), verbose=0)
    new_prediction = np.squeeze(new_prediction, axis=0)
    predicted_frame = np.expand_dims(new_prediction[-1, ...], axis=0)
    # Extend the set of prediction frames.
    frames = np.concatenate((frames, predicted_frame), axis=0)

print("Error of the new frames:", np.mean((frames[5:] - original_frames) ** 2))
