"""Transfer learning and fine-tuning: a frozen base, a new top, features computed once, then all layers trained."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

image_size = (12, 12)


def make_images(count, kinds):
    labels = np.random.randint(kinds, size=count)
    grid = np.arange(image_size[0])
    images = np.random.uniform(0, 80, size=(count, *image_size, 3))
    for i, label in enumerate(labels):
        images[i] += 90 * (1 + np.sin((label + 1) * grid)[:, None, None])
    return images.astype("float32"), labels


def make_base_model():
    inputs = keras.Input(shape=(*image_size, 3))
    x = inputs
    for filters in (8, 12):
        x = layers.SeparableConv2D(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.MaxPooling2D(2)(x)
    return keras.Model(inputs, x, name="base")


base_model = make_base_model()
pretraining = keras.Sequential(
    [layers.Rescaling(scale=1 / 127.5, offset=-1), base_model, layers.GlobalAveragePooling2D(), layers.Dense(4)]
)
pretraining.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
pretraining.fit(*make_images(150, 4), batch_size=32, epochs=2)
base_model.save_weights("base.weights.h5")

images, labels = make_images(140, 2)
train_ds = tf.data.Dataset.from_tensor_slices((images[:100], labels[:100]))
validation_ds = tf.data.Dataset.from_tensor_slices((images[100:], labels[100:]))

augmentation_layers = [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)]


def data_augmentation(x):
    for layer in augmentation_layers:
        x = layer(x)
    return x


batch_size = 32
validation_ds = validation_ds.batch(batch_size).prefetch(tf.data.AUTOTUNE).cache()
augmented_ds = train_ds.batch(batch_size).map(lambda x, y: (data_augmentation(x), y)).prefetch(tf.data.AUTOTUNE)

base_model = make_base_model()
base_model.load_weights("base.weights.h5")
base_model.trainable = False  # Freeze the base_model

inputs = keras.Input(shape=(*image_size, 3))
scale_layer = layers.Rescaling(scale=1 / 127.5, offset=-1)
x = scale_layer(inputs)
# The base model contains batchnorm layers. We want to keep them in inference mode when we unfreeze
# the base model for fine-tuning, so we make sure that it runs in inference mode here.
x = base_model(x, training=False)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.2)(x)  # Regularize with dropout
outputs = layers.Dense(1)(x)
model = keras.Model(inputs, outputs)
model.summary(show_trainable=True)

model.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy()],
)
history = model.fit(augmented_ds, epochs=2, validation_data=validation_ds)

base_model.trainable = True
model.summary(show_trainable=True)
model.compile(
    optimizer=keras.optimizers.Adam(1e-5),  # Low learning rate
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy()],
)
history = model.fit(augmented_ds, epochs=1, validation_data=validation_ds)
print(history.history, "test:", model.evaluate(validation_ds))

features_ds = train_ds.batch(batch_size).map(lambda x, y: (base_model(scale_layer(x), training=False), y)).cache()
head = keras.Sequential([layers.GlobalAveragePooling2D(), layers.Dense(1, activation="sigmoid")])
head.compile(optimizer=keras.optimizers.SGD(0.1), loss="binary_crossentropy")
print(head.fit(features_ds, epochs=2).history)
