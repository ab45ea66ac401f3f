"""A VQ-VAE whose codebook is not trained: it follows moving averages of the encoder's outputs."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1234)

LATENT_DIM = 4
NUM_EMBEDDINGS = 8


class VectorQuantizerEMA(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost=0.25, decay=0.9, epsilon=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.commitment_cost = commitment_cost
        self.decay = decay
        self.epsilon = epsilon
        self.perplexity = keras.metrics.Mean(name="perplexity")

    def build(self, input_shape):
        shape = (self.num_embeddings, self.embedding_dim)
        self.embeddings = self.add_weight(
            name="embeddings", shape=shape, initializer=keras.initializers.RandomUniform(-1, 1), trainable=False
        )
        self.ema_cluster_size = self.add_weight(
            name="ema_cluster_size", shape=(self.num_embeddings,), initializer="zeros", trainable=False
        )
        self.ema_w = self.add_weight(name="ema_w", shape=shape, initializer="zeros", trainable=False)
        self.ema_w.assign(self.embeddings)

    def get_code_indices(self, flat):
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(self.embeddings**2, axis=1)
            - 2 * ops.matmul(flat, ops.transpose(self.embeddings))
        )
        return ops.argmin(distances, axis=1)

    def call(self, x, training=False):
        flat = ops.reshape(x, (-1, self.embedding_dim))
        encodings = ops.one_hot(self.get_code_indices(flat), self.num_embeddings, dtype=x.dtype)
        quantized = ops.reshape(ops.matmul(encodings, self.embeddings), ops.shape(x))
        if training:
            cluster_size = self.decay * self.ema_cluster_size + (1 - self.decay) * ops.sum(encodings, axis=0)
            dw = ops.matmul(ops.transpose(encodings), ops.stop_gradient(flat))
            self.ema_cluster_size.assign(cluster_size)
            self.ema_w.assign(self.decay * self.ema_w + (1 - self.decay) * dw)
            n = ops.sum(self.ema_cluster_size)
            size = (self.ema_cluster_size + self.epsilon) / (n + self.num_embeddings * self.epsilon) * n
            self.embeddings.assign(self.ema_w / ops.expand_dims(size, -1))
        self.add_loss(self.commitment_cost * ops.mean((ops.stop_gradient(quantized) - x) ** 2))
        probabilities = ops.mean(encodings, axis=0)
        self.perplexity.update_state(ops.exp(-ops.sum(probabilities * ops.log(probabilities + 1e-10))))
        # Straight-through estimator.
        return x + ops.stop_gradient(quantized - x)


def get_encoder():
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2D(LATENT_DIM, 1, padding="same"),
        ],
        name="encoder",
    )


def get_decoder():
    return keras.Sequential(
        [
            layers.Input((4, 4, LATENT_DIM)),
            layers.Conv2DTranspose(8, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2DTranspose(1, 3, padding="same"),
        ],
        name="decoder",
    )


class VQVAE(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = get_encoder()
        self.vq_layer = VectorQuantizerEMA(NUM_EMBEDDINGS, LATENT_DIM, name="vector_quantizer")
        self.decoder = get_decoder()

    def call(self, x, training=False):
        return self.decoder(self.vq_layer(self.encoder(x), training=training))


rng = np.random.default_rng(0)
phase = rng.uniform(0, 2 * np.pi, size=(230, 1, 1))
wave = np.sin(np.arange(8)[None, :, None] * rng.choice([0.8, 1.6], size=(230, 1, 1)) + phase) * np.ones((1, 1, 8))
images = np.where(rng.random((230, 1, 1)) < 0.5, wave, np.swapaxes(wave, 1, 2))[..., None].astype("float32")
train_data, test_data = images[:190], images[190:]
data_variance = np.var(train_data)

vqvae = VQVAE()
vqvae.compile(optimizer=keras.optimizers.Adam(3e-3), loss=lambda y, p: ops.mean((y - p) ** 2) / data_variance)
vqvae.fit(train_data, train_data, epochs=4, batch_size=32, verbose=2)

print("Evaluation:", vqvae.evaluate(test_data, test_data, batch_size=16, return_dict=True, verbose=0))
vqvae.predict(test_data, verbose=0)
vqvae.encoder.predict(test_data, verbose=0)
