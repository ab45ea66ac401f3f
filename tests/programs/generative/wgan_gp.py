"""A Wasserstein GAN with gradient penalty."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

IMG_SHAPE = (12, 12, 1)
BATCH_SIZE = 32
noise_dim = 16

train_images = np.zeros((144, 12, 12))
for picture in train_images:
    h, w = np.random.randint(4, 11, size=2)
    picture[6 - h // 2 : 6 + h // 2, 6 - w // 2 : 6 + w // 2] = np.random.randint(150, 256)
train_images = train_images.reshape(train_images.shape[0], *IMG_SHAPE).astype("float32")
train_images = (train_images - 127.5) / 127.5


def conv_block(x, filters, activation, kernel_size=(3, 3), strides=(1, 1), use_bias=True, drop_value=0.0):
    x = layers.Conv2D(filters, kernel_size, strides=strides, padding="same", use_bias=use_bias)(x)
    x = activation(x)
    if drop_value:
        x = layers.Dropout(drop_value)(x)
    return x


def get_discriminator_model():
    img_input = layers.Input(shape=IMG_SHAPE)
    x = conv_block(img_input, 8, layers.LeakyReLU(0.2), kernel_size=(5, 5), strides=(2, 2))
    x = conv_block(x, 16, layers.LeakyReLU(0.2), kernel_size=(5, 5), strides=(2, 2), drop_value=0.3)
    x = layers.Flatten()(x)
    x = layers.Dropout(0.2)(x)
    x = layers.Dense(1)(x)
    return keras.models.Model(img_input, x, name="discriminator")


def upsample_block(x, filters, activation, up_size=(2, 2), use_bn=False):
    x = layers.UpSampling2D(up_size)(x)
    x = layers.Conv2D(filters, (3, 3), padding="same", use_bias=not use_bn)(x)
    if use_bn:
        x = layers.BatchNormalization()(x)
    return activation(x)


def get_generator_model():
    noise = layers.Input(shape=(noise_dim,))
    x = layers.Dense(3 * 3 * 16, use_bias=False)(noise)
    x = layers.BatchNormalization()(x)
    x = layers.LeakyReLU(0.2)(x)
    x = layers.Reshape((3, 3, 16))(x)
    x = upsample_block(x, 8, layers.LeakyReLU(0.2), use_bn=True)
    x = upsample_block(x, 1, layers.Activation("tanh"), use_bn=True)
    return keras.models.Model(noise, x, name="generator")


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim, discriminator_extra_steps=3, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_steps = discriminator_extra_steps
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        """Calculated on an interpolated image, and added to the discriminator loss."""
        alpha = tf.random.uniform([batch_size, 1, 1, 1], 0.0, 1.0, dtype=fake_images.dtype)
        diff = fake_images - real_images
        interpolated = real_images + alpha * diff
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            random_latent_vectors = tf.random.normal(shape=(batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                fake_images = self.generator(random_latent_vectors, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))
        random_latent_vectors = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            generated_images = self.generator(random_latent_vectors, training=True)
            gen_img_logits = self.discriminator(generated_images, training=True)
            g_loss = self.g_loss_fn(gen_img_logits)
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


class GANMonitor(keras.callbacks.Callback):
    def __init__(self, num_img=6, latent_dim=128):
        self.num_img = num_img
        self.latent_dim = latent_dim

    def on_epoch_end(self, epoch, logs=None):
        random_latent_vectors = tf.random.normal(shape=(self.num_img, self.latent_dim))
        generated_images = self.model.generator(random_latent_vectors)
        generated_images = (generated_images * 127.5) + 127.5
        for i in range(self.num_img):
            np.save(f"generated_img_{i}_{epoch}.npy", generated_images[i].numpy())


def discriminator_loss(real_img, fake_img):
    real_loss = tf.reduce_mean(real_img)
    fake_loss = tf.reduce_mean(fake_img)
    return fake_loss - real_loss


def generator_loss(fake_img):
    return -tf.reduce_mean(fake_img)


generator_optimizer = keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9)
discriminator_optimizer = keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9)

wgan = WGAN(
    discriminator=get_discriminator_model(),
    generator=get_generator_model(),
    latent_dim=noise_dim,
    discriminator_extra_steps=3,
)
wgan.compile(
    d_optimizer=discriminator_optimizer,
    g_optimizer=generator_optimizer,
    g_loss_fn=generator_loss,
    d_loss_fn=discriminator_loss,
)

cbk = GANMonitor(num_img=3, latent_dim=noise_dim)
wgan.fit(train_images, batch_size=BATCH_SIZE, epochs=2, callbacks=[cbk])
