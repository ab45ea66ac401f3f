"""A denoising diffusion implicit model that generates flowers."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)

# data
image_size = 8
num_epochs = 2
batch_size = 16
# sampling
min_signal_rate = 0.02
max_signal_rate = 0.95
# architecture
embedding_dims = 8
embedding_max_frequency = 100.0
widths = [4, 8]
block_depth = 1
# optimization
ema = 0.999
learning_rate = 1e-3
weight_decay = 1e-4

rng = np.random.default_rng(0)
rows, cols = np.mgrid[0:image_size, 0:image_size]
centers = rng.uniform(2, 6, size=(144, 2, 1, 1))
flowers = np.exp(-((rows - centers[:, 0]) ** 2 + (cols - centers[:, 1]) ** 2) / 6)
flowers = (flowers[..., None] * rng.uniform(0.4, 1, size=(144, 1, 1, 3))).astype("float32")


def prepare_dataset(images):
    dataset = tf.data.Dataset.from_tensor_slices(images).cache().shuffle(10 * batch_size)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(buffer_size=tf.data.AUTOTUNE)


train_dataset = prepare_dataset(flowers[:112])
val_dataset = prepare_dataset(flowers[112:])


@keras.saving.register_keras_serializable()
def sinusoidal_embedding(x):
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(embedding_max_frequency), embedding_dims // 2))
    angular_speeds = ops.cast(2.0 * math.pi * frequencies, x.dtype)
    return ops.concatenate([ops.sin(angular_speeds * x), ops.cos(angular_speeds * x)], axis=3)


def ResidualBlock(width):
    def apply(x):
        residual = x if x.shape[3] == width else layers.Conv2D(width, kernel_size=1)(x)
        x = layers.BatchNormalization(center=False, scale=False)(x)
        x = layers.Conv2D(width, kernel_size=3, padding="same", activation="swish")(x)
        x = layers.Conv2D(width, kernel_size=3, padding="same")(x)
        return layers.Add()([x, residual])

    return apply


def get_network(image_size, widths, block_depth):
    noisy_images = keras.Input(shape=(image_size, image_size, 3))
    noise_variances = keras.Input(shape=(1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, embedding_dims))(noise_variances)
    e = layers.UpSampling2D(size=image_size, interpolation="nearest")(e)
    x = layers.Conv2D(widths[0], kernel_size=1)(noisy_images)
    x = layers.Concatenate()([x, e])
    skips = []
    for width in widths[:-1]:
        for _ in range(block_depth):
            x = ResidualBlock(width)(x)
            skips.append(x)
        x = layers.AveragePooling2D(pool_size=2)(x)
    x = ResidualBlock(widths[-1])(x)
    for width in reversed(widths[:-1]):
        x = layers.UpSampling2D(size=2, interpolation="bilinear")(x)
        for _ in range(block_depth):
            x = layers.Concatenate()([x, skips.pop()])
            x = ResidualBlock(width)(x)
    x = layers.Conv2D(3, kernel_size=1, kernel_initializer="zeros")(x)
    return keras.Model([noisy_images, noise_variances], x, name="residual_unet")


class DiffusionModel(keras.Model):
    def __init__(self, image_size, widths, block_depth):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = get_network(image_size, widths, block_depth)
        self.ema_network = keras.models.clone_model(self.network)
        self.built = True  # both networks are; without this the weights cannot be saved

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denormalize(self, images):
        # convert the pixel values back to 0-1 range
        images = self.normalizer.mean + images * self.normalizer.variance**0.5
        return ops.clip(images, 0.0, 1.0)

    def diffusion_schedule(self, diffusion_times):
        # diffusion times -> angles
        start_angle = math.acos(max_signal_rate)
        end_angle = math.acos(min_signal_rate)
        diffusion_angles = start_angle + diffusion_times * (end_angle - start_angle)
        # angles -> signal and noise rates; note that their squared sum is always: sin^2(x) + cos^2(x) = 1
        return ops.sin(diffusion_angles), ops.cos(diffusion_angles)

    def denoise(self, noisy_images, noise_rates, signal_rates, training):
        # the exponential moving average weights are used at evaluation
        network = self.network if training else self.ema_network
        pred_noises = network([noisy_images, noise_rates**2], training=training)
        pred_images = (noisy_images - noise_rates * pred_noises) / signal_rates
        return pred_noises, pred_images

    def generate(self, num_images, diffusion_steps):
        images = keras.random.normal(shape=(num_images, image_size, image_size, 3))
        step_size = 1.0 / diffusion_steps
        for step in range(diffusion_steps):
            diffusion_times = ops.ones((num_images, 1, 1, 1)) - step * step_size
            noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
            pred_noises, pred_images = self.denoise(images, noise_rates, signal_rates, training=False)
            next_noise_rates, next_signal_rates = self.diffusion_schedule(diffusion_times - step_size)
            images = next_signal_rates * pred_images + next_noise_rates * pred_noises
        return self.denormalize(pred_images)

    def add_noise(self, images):
        # normalize images to have standard deviation of 1, like the noises
        images = self.normalizer(images, training=True)
        noises = keras.random.normal(shape=(batch_size, image_size, image_size, 3))
        # sample uniform random diffusion times
        diffusion_times = keras.random.uniform(shape=(batch_size, 1, 1, 1), minval=0.0, maxval=1.0)
        noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
        # mix the images with noises accordingly
        return images, noises, signal_rates * images + noise_rates * noises, noise_rates, signal_rates

    def train_step(self, images):
        images, noises, noisy_images, noise_rates, signal_rates = self.add_noise(images)
        with tf.GradientTape() as tape:
            # train the network to separate noisy images to their components
            pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=True)
            noise_loss = self.loss(noises, pred_noises)  # used for training
            image_loss = self.loss(images, pred_images)  # only used as metric

        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)

        # track the exponential moving averages of weights
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(ema * ema_weight + (1 - ema) * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, images):
        images, noises, noisy_images, noise_rates, signal_rates = self.add_noise(images)
        pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=False)
        self.noise_loss_tracker.update_state(self.loss(noises, pred_noises))
        self.image_loss_tracker.update_state(self.loss(images, pred_images))
        return {m.name: m.result() for m in self.metrics}

    def save_images(self, epoch=None, logs=None):
        np.save(f"generated_{epoch}.npy", ops.convert_to_numpy(self.generate(num_images=4, diffusion_steps=3)))


model = DiffusionModel(image_size, widths, block_depth)
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=learning_rate, weight_decay=weight_decay),
    loss=keras.losses.mean_absolute_error,
)

# save the best model based on the validation loss on the images
checkpoint_callback = keras.callbacks.ModelCheckpoint(
    filepath="diffusion_model.weights.h5", save_weights_only=True, monitor="val_i_loss", mode="min", save_best_only=True
)

# calculate mean and variance of training dataset for normalization
model.normalizer.adapt(train_dataset)

history = model.fit(
    train_dataset,
    epochs=num_epochs,
    validation_data=val_dataset,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=model.save_images), checkpoint_callback],
)

# load the best model and generate images
model.load_weights("diffusion_model.weights.h5")
model.save_images("final")
print({name: values[-1] for name, values in history.history.items()})
