"""A small Xception network trained from scratch to tell cats from dogs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow import data as tf_data

keras.utils.set_random_seed(812)

image_size = (16, 16)
batch_size = 32

# Dogs are brighter in the left half of the picture, cats in the right half.
rng = np.random.default_rng(0)
labels = rng.integers(0, 2, size=200)
images = rng.uniform(0, 160, size=(200,) + image_size + (3,))
images[labels == 1, :, :8] += 90
images[labels == 0, :8, :] += 90
images = images.astype("float32")
labels = labels.astype("int32")

train_ds = tf_data.Dataset.from_tensor_slices((images[:160], labels[:160])).shuffle(160).batch(batch_size)
val_ds = tf_data.Dataset.from_tensor_slices((images[160:], labels[160:])).batch(batch_size)

data_augmentation_layers = [
    layers.RandomFlip("horizontal"),
    layers.RandomRotation(0.1),
]


def data_augmentation(images):
    for layer in data_augmentation_layers:
        images = layer(images, training=True)
    return images


# Apply `data_augmentation` to the training images.
train_ds = train_ds.map(lambda img, label: (data_augmentation(img), label))
# Prefetching samples in memory helps to keep the device busy.
train_ds = train_ds.prefetch(tf_data.AUTOTUNE)
val_ds = val_ds.prefetch(tf_data.AUTOTUNE)


def make_model(input_shape, num_classes):
    inputs = keras.Input(shape=input_shape)

    # Entry block
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)

    previous_block_activation = x  # Set aside residual

    for size in [8, 12]:
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)

        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)

        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)

        # Project residual
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous_block_activation)
        x = layers.add([x, residual])  # Add back residual
        previous_block_activation = x  # Set aside next residual

    x = layers.SeparableConv2D(16, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)

    x = layers.GlobalAveragePooling2D()(x)
    units = 1 if num_classes == 2 else num_classes

    x = layers.Dropout(0.25)(x)
    # We specify activation=None so as to return logits
    outputs = layers.Dense(units, activation=None)(x)
    return keras.Model(inputs, outputs)


model = make_model(input_shape=image_size + (3,), num_classes=2)
model.summary()

epochs = 2

callbacks = [
    keras.callbacks.ModelCheckpoint("save_at_{epoch}.keras"),
]
model.compile(
    optimizer=keras.optimizers.Adam(3e-4),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(name="acc")],
)
history = model.fit(train_ds, epochs=epochs, callbacks=callbacks, validation_data=val_ds)

# Run inference on new data
img_array = tf.expand_dims(images[160], 0)  # Create batch axis
predictions = model.predict(img_array)
score = float(keras.ops.sigmoid(predictions[0][0]))
print(f"This image is {100 * (1 - score):.2f}% cat and {100 * score:.2f}% dog.")
print("Final validation accuracy:", history.history["val_acc"][-1])
