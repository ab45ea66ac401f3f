"""Image super-resolution with an efficient sub-pixel convnet."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)

crop_size = 16
upscale_factor = 2
input_size = crop_size // upscale_factor
batch_size = 8

# Smooth wavy pictures with values in the range [0, 255].
rng = np.random.default_rng(0)
frequencies = rng.uniform(0.2, 0.7, size=(120, 2, 1, 1))
phases = rng.uniform(0, 6, size=(120, 1, 1))
rows, cols = np.mgrid[0:crop_size, 0:crop_size]
pictures = np.sin(frequencies[:, 0] * rows + frequencies[:, 1] * cols + phases)
pictures = (127.5 * (pictures[..., None] + 1)).astype("float32")
test_pictures = pictures[100:]

train_ds = tf.data.Dataset.from_tensor_slices(pictures[:80]).batch(batch_size)
valid_ds = tf.data.Dataset.from_tensor_slices(pictures[80:100]).batch(batch_size)


def scaling(input_image):
    return input_image / 255.0


def process_input(input, input_size):
    return tf.image.resize(input, [input_size, input_size], method="area")


# Scale from (0, 255) to (0, 1), then make the pairs of low and high resolution.
train_ds = train_ds.map(scaling).map(lambda x: (process_input(x, input_size), x))
train_ds = train_ds.prefetch(buffer_size=32)
valid_ds = valid_ds.map(scaling).map(lambda x: (process_input(x, input_size), x))
valid_ds = valid_ds.prefetch(buffer_size=32)


class DepthToSpace(layers.Layer):
    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def call(self, input):
        batch, height, width, depth = ops.shape(input)
        depth = depth // (self.block_size**2)
        x = ops.reshape(input, [batch, height, width, self.block_size, self.block_size, depth])
        x = ops.transpose(x, [0, 1, 3, 2, 4, 5])
        return ops.reshape(x, [batch, height * self.block_size, width * self.block_size, depth])


def get_model(upscale_factor=3, channels=1):
    conv_args = {"activation": "relu", "kernel_initializer": "orthogonal", "padding": "same"}
    inputs = keras.Input(shape=(None, None, channels))
    x = layers.Conv2D(16, 5, **conv_args)(inputs)
    x = layers.Conv2D(16, 3, **conv_args)(x)
    x = layers.Conv2D(8, 3, **conv_args)(x)
    x = layers.Conv2D(channels * (upscale_factor**2), 3, **conv_args)(x)
    outputs = DepthToSpace(upscale_factor)(x)
    return keras.Model(inputs, outputs)


class ESPCNCallback(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.test_img = process_input(scaling(test_pictures[:1]), input_size)
        self.mean_psnr = []

    # Store PSNR value in each epoch.
    def on_epoch_begin(self, epoch, logs=None):
        self.psnr = []

    def on_epoch_end(self, epoch, logs=None):
        self.mean_psnr.append(np.mean(self.psnr))
        print(f"Mean PSNR for epoch: {self.mean_psnr[-1]:.2f}")
        prediction = self.model.predict(self.test_img, verbose=0)
        np.save(f"prediction-{epoch}.npy", prediction)

    def on_test_batch_end(self, batch, logs=None):
        self.psnr.append(10 * math.log10(1 / logs["loss"]))


early_stopping_callback = keras.callbacks.EarlyStopping(monitor="loss", patience=10)

checkpoint_filepath = "checkpoint.weights.h5"
model_checkpoint_callback = keras.callbacks.ModelCheckpoint(
    filepath=checkpoint_filepath, save_weights_only=True, monitor="loss", mode="min", save_best_only=True
)

model = get_model(upscale_factor=upscale_factor, channels=1)
model.summary()

callbacks = [ESPCNCallback(), early_stopping_callback, model_checkpoint_callback]
loss_fn = keras.losses.MeanSquaredError()
optimizer = keras.optimizers.Adam(learning_rate=0.001)

epochs = 3
model.compile(optimizer=optimizer, loss=loss_fn)
history = model.fit(train_ds, epochs=epochs, callbacks=callbacks, validation_data=valid_ds, verbose=2)

# The model weights (that are considered the best) are loaded into the model.
model.load_weights(checkpoint_filepath)

total_test_psnr = 0.0
for picture in test_pictures[:5]:
    highres_img = scaling(picture[None])
    prediction = model.predict(process_input(highres_img, input_size), verbose=0)
    total_test_psnr += float(tf.image.psnr(tf.cast(prediction[0], tf.float32), highres_img[0], max_val=1))
print(f"Avg. PSNR of reconstructions is {total_test_psnr / 5:.4f}")
