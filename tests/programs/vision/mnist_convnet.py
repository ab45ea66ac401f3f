"""A small convnet on handwritten digits."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)

num_classes = 10
input_shape = (14, 14, 1)


def load_data(num_train=230, num_test=70):
    """Every digit is a fixed blotchy pattern with some noise over it."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, size=(num_classes, 14, 14))
    labels = rng.integers(0, num_classes, size=num_train + num_test)
    images = patterns[labels] + rng.integers(0, 56, size=(num_train + num_test, 14, 14))
    images = images.astype("uint8")
    return (images[:num_train], labels[:num_train]), (images[num_train:], labels[num_train:])


(x_train, y_train), (x_test, y_test) = load_data()

x_train = x_train.astype("float32") / 255
x_test = x_test.astype("float32") / 255
x_train = np.expand_dims(x_train, -1)
x_test = np.expand_dims(x_test, -1)

y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model.summary()
batch_size = 32
epochs = 3

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1)
score = model.evaluate(x_test, y_test, verbose=0)
