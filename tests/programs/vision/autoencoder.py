"""A deep convolutional autoencoder for image denoising."""

import numpy as np
from keras import layers
from keras.models import Model
from keras.utils import set_random_seed

set_random_seed(812)


def preprocess(array):
    """Normalizes the supplied array and reshapes it."""
    array = array.astype("float32") / 255.0
    array = np.reshape(array, (len(array), 12, 12, 1))
    return array


def noise(array):
    """Adds random noise to each image in the supplied array."""
    noise_factor = 0.4
    noisy_array = array + noise_factor * np.random.normal(loc=0.0, scale=1.0, size=array.shape)
    return np.clip(noisy_array, 0.0, 1.0)


def draw_digits(num_images):
    """Draws a crossing of a horizontal and a vertical stroke in each image."""
    images = np.zeros((num_images, 12, 12), dtype="uint8")
    for image in images:
        row, col = np.random.randint(1, 10, size=2)
        image[row : row + 2, 1:11] = np.random.randint(160, 256)
        image[1:11, col : col + 2] = np.random.randint(160, 256)
    return images


# Since we only need images from the dataset to encode and decode, we won't use the labels.
train_data, test_data = draw_digits(210), draw_digits(50)

# Normalize and reshape the data
train_data = preprocess(train_data)
test_data = preprocess(test_data)

# Create a copy of the data with added noise
noisy_train_data = noise(train_data)
noisy_test_data = noise(test_data)

input = layers.Input(shape=(12, 12, 1))

# Encoder
x = layers.Conv2D(16, (3, 3), activation="relu", padding="same")(input)
x = layers.MaxPooling2D((2, 2), padding="same")(x)
x = layers.Conv2D(16, (3, 3), activation="relu", padding="same")(x)
x = layers.MaxPooling2D((2, 2), padding="same")(x)

# Decoder
x = layers.Conv2DTranspose(16, (3, 3), strides=2, activation="relu", padding="same")(x)
x = layers.Conv2DTranspose(16, (3, 3), strides=2, activation="relu", padding="same")(x)
x = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)

# Autoencoder
autoencoder = Model(input, x)
autoencoder.compile(optimizer="adam", loss="binary_crossentropy")
autoencoder.summary()

# Now we can train our autoencoder using `train_data` as both our input data and target.
autoencoder.fit(
    x=train_data,
    y=train_data,
    epochs=2,
    batch_size=32,
    shuffle=True,
    validation_data=(test_data, test_data),
)

# Let's predict on our test dataset.
predictions = autoencoder.predict(test_data)
print("Reconstruction error:", np.mean((predictions - test_data) ** 2))

# Now we retrain it with the noisy data as input and the clean data as target, so
# that the autoencoder learns how to denoise the images.
history = autoencoder.fit(
    x=noisy_train_data,
    y=train_data,
    epochs=3,
    batch_size=32,
    shuffle=True,
    validation_data=(noisy_test_data, test_data),
)

predictions = autoencoder.predict(noisy_test_data)
print("Denoising error:", np.mean((predictions - test_data) ** 2))
print("Validation loss:", history.history["val_loss"][-1])
