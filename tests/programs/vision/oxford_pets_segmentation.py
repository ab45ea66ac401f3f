"""A network like U-Net that labels every pixel of images of pets."""

import math

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)

img_size = (16, 16)
num_classes = 3
batch_size = 32

rng = np.random.default_rng(0)
num_samples = 150
centers = rng.uniform(5, 11, size=(num_samples, 2))
radii = rng.uniform(3, 5, size=num_samples)
rows, cols = np.mgrid[0 : img_size[0], 0 : img_size[1]]
distance = np.sqrt((rows - centers[:, :1, None]) ** 2 + (cols - centers[:, 1:, None]) ** 2)
masks = np.where(distance < radii[:, None, None], 0, 1)
masks[np.abs(distance - radii[:, None, None]) < 0.7] = 2
pictures = 0.6 * (masks[..., None] == 0) + 0.4 * rng.random((num_samples,) + img_size + (3,))


class OxfordPets(keras.utils.PyDataset):
    """Helper to iterate over the data (as Numpy arrays)."""

    def __init__(self, batch_size, img_size, input_imgs, target_imgs, **kwargs):
        super().__init__(**kwargs)
        self.batch_size = batch_size
        self.img_size = img_size
        self.input_imgs = input_imgs
        self.target_imgs = target_imgs

    def __len__(self):
        return math.ceil(len(self.target_imgs) / self.batch_size)

    def __getitem__(self, idx):
        """Returns tuple (input, target) correspond to batch #idx."""
        i = idx * self.batch_size
        batch_input = self.input_imgs[i : i + self.batch_size]
        batch_target = self.target_imgs[i : i + self.batch_size]
        x = np.zeros((len(batch_input),) + self.img_size + (3,), dtype="float32")
        for j, img in enumerate(batch_input):
            x[j] = img
        y = np.zeros((len(batch_target),) + self.img_size + (1,), dtype="uint8")
        for j, img in enumerate(batch_target):
            y[j] = np.expand_dims(img, 2)
        return x, y


def get_model(img_size, num_classes):
    inputs = keras.Input(shape=img_size + (3,))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous_block_activation = x  # Set aside residual
    for filters in [8, 12]:
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous_block_activation)
        x = layers.add([x, residual])
        previous_block_activation = x
    for filters in [12, 8, 8]:
        x = layers.Activation("relu")(x)
        x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.UpSampling2D(2)(previous_block_activation)
        residual = layers.Conv2D(filters, 1, padding="same")(residual)
        x = layers.add([x, residual])
        previous_block_activation = x
    outputs = layers.Conv2D(num_classes, 3, activation="softmax", padding="same")(x)
    return keras.Model(inputs, outputs)


model = get_model(img_size, num_classes)
model.summary()

val_samples = 40
train_gen = OxfordPets(batch_size, img_size, pictures[:-val_samples], masks[:-val_samples])
val_gen = OxfordPets(batch_size, img_size, pictures[-val_samples:], masks[-val_samples:])

model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy")
callbacks = [keras.callbacks.ModelCheckpoint("oxford_segmentation.keras", save_best_only=True)]

epochs = 2
model.fit(train_gen, epochs=epochs, validation_data=val_gen, callbacks=callbacks, verbose=2)

model.predict(val_gen)
