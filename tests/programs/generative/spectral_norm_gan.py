"""SNGAN in miniature: the critic's layers have spectral normalization, and the loss is a hinge."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.layers import SpectralNormalization

keras.utils.set_random_seed(64)

NOISE_DIM = 8
BATCH_SIZE = 24


def make_discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            SpectralNormalization(layers.Conv2D(8, 3, strides=2, padding="same")),
            layers.LeakyReLU(negative_slope=0.1),
            SpectralNormalization(layers.Conv2D(16, 3, strides=2, padding="same"), power_iterations=2),
            layers.LeakyReLU(negative_slope=0.1),
            layers.Flatten(),
            SpectralNormalization(layers.Dense(1)),
        ],
        name="discriminator",
    )


def make_generator():
    return keras.Sequential(
        [
            keras.Input((NOISE_DIM,)),
            layers.Dense(2 * 2 * 8),
            layers.Reshape((2, 2, 8)),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )


class SNGAN(keras.Model):
    def __init__(self, discriminator, generator, noise_dim, discriminator_steps=2):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.noise_dim = noise_dim
        self.discriminator_steps = discriminator_steps
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]

        for _ in range(self.discriminator_steps):
            noise = keras.random.normal((batch_size, self.noise_dim), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise, training=True)
                real_logits = self.discriminator(real_images, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                d_loss = tf.reduce_mean(tf.nn.relu(1.0 - real_logits)) + tf.reduce_mean(tf.nn.relu(1.0 + fake_logits))
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))

        noise = keras.random.normal((batch_size, self.noise_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            fake_logits = self.discriminator(self.generator(noise, training=True), training=False)
            g_loss = -tf.reduce_mean(fake_logits)
        g_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(g_gradient, self.generator.trainable_variables))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Monitor(keras.callbacks.Callback):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def on_epoch_end(self, epoch, logs=None):
        images = self.model.generator.predict(self.noise, verbose=0)
        print(f"epoch {epoch}: mean {images.mean():.4f}, deviation {images.std():.4f}")


# Pictures of one bright square on black, between -1 and 1
images = -np.ones((134, 8, 8, 1), dtype="float32")
for image in images:
    row, col = np.random.randint(0, 5, size=2)
    image[row : row + 4, col : col + 4] = 0.8
dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(200, seed=0).batch(BATCH_SIZE)

gan = SNGAN(make_discriminator(), make_generator(), NOISE_DIM)
gan.compile(
    d_optimizer=keras.optimizers.Adam(4e-4, beta_1=0.0, beta_2=0.9),
    g_optimizer=keras.optimizers.Adam(1e-4, beta_1=0.0, beta_2=0.9),
)
fixed_noise = np.random.normal(size=(20, NOISE_DIM))
history = gan.fit(dataset, epochs=3, callbacks=[Monitor(fixed_noise)], verbose=0)

print("d_loss:", history.history["d_loss"])
print("g_loss:", history.history["g_loss"])
scores = (
    gan.discriminator.predict(images, batch_size=50, verbose=0),
    gan.discriminator.predict(gan.predict(fixed_noise)),
)
print("scores of real and of fake pictures:", float(scores[0].mean()), float(scores[1].mean()))
kernels = [w for w in gan.discriminator.get_weights() if w.ndim in (2, 4) and w.shape[0] != 1]
norms = [np.linalg.svd(kernel.reshape(-1, kernel.shape[-1]), compute_uv=False)[0] for kernel in kernels]
print("largest singular values:", norms)
