"""Density estimation with a Real NVP normalizing flow."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, regularizers

keras.utils.set_random_seed(812)


def make_moons(n_samples, noise):
    """Two interleaving half circles."""
    angles = np.pi * np.random.rand(n_samples)
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    lower = np.stack([1 - np.cos(angles), 0.5 - np.sin(angles)], axis=1)
    points = np.where(np.random.rand(n_samples, 1) < 0.5, upper, lower)
    return points + noise * np.random.normal(size=points.shape)


data = make_moons(240, noise=0.05).astype("float32")
norm = layers.Normalization()
norm.adapt(data)
normalized_data = norm(data)

# Creating a custom layer with keras API.
output_dim = 16
reg = 0.01


def Coupling(input_shape):
    input = keras.layers.Input(shape=(input_shape,))

    t_layer_1 = layers.Dense(output_dim, activation="relu", kernel_regularizer=regularizers.l2(reg))(input)
    t_layer_2 = layers.Dense(output_dim, activation="relu", kernel_regularizer=regularizers.l2(reg))(t_layer_1)
    t_layer_3 = layers.Dense(input_shape, activation="linear", kernel_regularizer=regularizers.l2(reg))(t_layer_2)

    s_layer_1 = layers.Dense(output_dim, activation="relu", kernel_regularizer=regularizers.l2(reg))(input)
    s_layer_2 = layers.Dense(output_dim, activation="relu", kernel_regularizer=regularizers.l2(reg))(s_layer_1)
    s_layer_3 = layers.Dense(input_shape, activation="tanh", kernel_regularizer=regularizers.l2(reg))(s_layer_2)

    return keras.Model(inputs=input, outputs=[s_layer_3, t_layer_3])


class RealNVP(keras.Model):
    def __init__(self, num_coupling_layers):
        super().__init__()
        self.num_coupling_layers = num_coupling_layers
        self.masks = np.array([[0, 1], [1, 0]] * (num_coupling_layers // 2), dtype=keras.config.floatx())
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.layers_list = [Coupling(2) for i in range(num_coupling_layers)]

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x, training=True):
        log_det_inv = 0
        direction = 1
        if training:
            direction = -1
        for i in range(self.num_coupling_layers)[::direction]:
            x_masked = x * self.masks[i]
            reversed_mask = 1 - self.masks[i]
            s, t = self.layers_list[i](x_masked)
            s *= reversed_mask
            t *= reversed_mask
            gate = (direction - 1) / 2
            x = reversed_mask * (x * tf.exp(direction * s) + direction * t * tf.exp(gate * s)) + x_masked
            log_det_inv += gate * tf.reduce_sum(s, [1])
        return x, log_det_inv

    # Log likelihood of the normal distribution plus the log determinant of the jacobian.
    def log_loss(self, x):
        y, logdet = self(x)
        log_prob = -0.5 * tf.reduce_sum(tf.square(y), axis=1) - np.log(2.0 * np.pi)
        log_likelihood = log_prob + logdet
        return -tf.reduce_mean(log_likelihood)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self.log_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


model = RealNVP(num_coupling_layers=4)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.0001))
history = model.fit(normalized_data, batch_size=32, epochs=3, verbose=2, validation_split=0.2)

# From data to latent space.
z, _ = model(normalized_data)
print("Latent mean and standard deviation:", np.mean(z, axis=0), np.std(z, axis=0))

# From latent space to data.
samples = np.random.normal(size=(100, 2))
x, _ = model.predict(samples)
print("Mean of the generated points:", x.mean(axis=0))
print("Validation loss:", history.history["val_loss"])
