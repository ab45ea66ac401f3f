"""Transfer learning and fine-tuning with a small pretrained base."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

IMG_SHAPE = (12, 12, 3)
BATCH_SIZE = 32


def make_pictures(num_pictures, num_classes, seed):
    rng = np.random.default_rng(seed)
    patterns = rng.uniform(0, 150, size=(num_classes,) + IMG_SHAPE)
    labels = rng.integers(0, num_classes, size=num_pictures)
    images = patterns[labels] + rng.uniform(0, 100, size=(num_pictures,) + IMG_SHAPE)
    return images.astype("float32"), labels


# ## Pretrain a base on a larger set of classes, and keep it without its top

images, labels = make_pictures(160, num_classes=8, seed=0)

base_inputs = keras.Input(shape=IMG_SHAPE)
x = layers.Conv2D(8, 3, padding="same", use_bias=False)(base_inputs)
x = layers.BatchNormalization()(x)
x = layers.ReLU()(x)
x = layers.MaxPooling2D(2)(x)
x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
x = layers.BatchNormalization()(x)
base_outputs = layers.ReLU()(x)
pretrained = keras.Model(base_inputs, base_outputs, name="small_base")

top = layers.GlobalAveragePooling2D()(pretrained.output)
top = layers.Dense(8, activation="softmax")(top)
pretraining_model = keras.Model(pretrained.input, top)
pretraining_model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
pretraining_model.fit(images / 127.5 - 1.0, labels, batch_size=BATCH_SIZE, epochs=1)
pretrained.save("small_base.keras")

# ## The new task

images, labels = make_pictures(210, num_classes=2, seed=1)
train_ds = tf.data.Dataset.from_tensor_slices((images[:170], labels[:170]))
validation_ds = tf.data.Dataset.from_tensor_slices((images[170:], labels[170:]))
print(f"Number of training samples: {train_ds.cardinality()}")
print(f"Number of validation samples: {validation_ds.cardinality()}")

train_ds = train_ds.shuffle(170).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).cache()
validation_ds = validation_ds.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).cache()

base_model = keras.models.load_model("small_base.keras")

# Freeze the base_model
base_model.trainable = False

# Create new model on top
inputs = keras.Input(shape=IMG_SHAPE)

# The base wants its inputs scaled from (0, 255) to a range of (-1., +1.)
scale_layer = layers.Rescaling(scale=1 / 127.5, offset=-1)
x = scale_layer(inputs)

# The base model contains batchnorm layers. We want to keep them in inference mode
# when we unfreeze the base model for fine-tuning, so we make sure that the
# base_model is running in inference mode here.
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
history = model.fit(train_ds, epochs=2, validation_data=validation_ds)

# ## Fine-tune the whole model

base_model.trainable = True
model.summary(show_trainable=True)

model.compile(
    optimizer=keras.optimizers.Adam(1e-5),  # Low learning rate
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy()],
)
history_fine = model.fit(train_ds, epochs=2, validation_data=validation_ds)

loss, accuracy = model.evaluate(validation_ds)
print("Validation loss before and after fine-tuning:", history.history["val_loss"][-1], loss)
print("Validation accuracy:", accuracy)
