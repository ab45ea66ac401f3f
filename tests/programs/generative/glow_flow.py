"""A normalizing flow as in Glow: ActNorm with data-dependent initialization, mixing of the dimensions, affine coupling."""

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import make_moons

keras.utils.set_random_seed(2718)

DIM = 4


class ActNorm(layers.Layer):
    """Scale and shift of each dimension; the first batch decides where they start."""

    def build(self, input_shape):
        dim = input_shape[-1]
        self.log_scale = self.add_weight(shape=(dim,), initializer="zeros", name="log_scale")
        self.shift = self.add_weight(shape=(dim,), initializer="zeros", name="shift")
        self.initialized = self.add_weight(
            shape=(), initializer="zeros", dtype="bool", trainable=False, name="initialized"
        )

    def call(self, x, training=False):
        if training:
            mean = ops.mean(x, axis=0)
            std = ops.std(x, axis=0) + 1e-6
            self.shift.assign(ops.where(self.initialized, self.shift, -mean))
            self.log_scale.assign(ops.where(self.initialized, self.log_scale, -ops.log(std)))
            self.initialized.assign(True)
        log_det = ops.sum(self.log_scale) * ops.ones_like(x[:, 0])
        return (x + self.shift) * ops.exp(self.log_scale), log_det

    def inverse(self, z):
        return z * ops.exp(-self.log_scale) - self.shift


class InvertibleLinear(layers.Layer):
    """A full matrix, which starts as a rotation."""

    def build(self, input_shape):
        dim = input_shape[-1]
        self.w = self.add_weight(shape=(dim, dim), initializer=keras.initializers.Orthogonal(seed=1), name="w")

    def call(self, x):
        log_det = ops.log(ops.abs(ops.det(self.w)))
        return ops.matmul(x, self.w), log_det * ops.ones_like(x[:, 0])

    def inverse(self, z):
        return ops.matmul(z, ops.inv(self.w))


class AffineCoupling(layers.Layer):
    def __init__(self, hidden=24, **kwargs):
        super().__init__(**kwargs)
        self.hidden = hidden

    def build(self, input_shape):
        half = input_shape[-1] // 2
        self.net = keras.Sequential(
            [
                layers.Dense(self.hidden, activation="relu"),
                layers.Dense(self.hidden, activation="relu"),
                layers.Dense(2 * half, kernel_initializer="zeros"),
            ]
        )
        self.net.build((None, half))

    def parameters(self, kept):
        log_s, t = ops.split(self.net(kept), 2, axis=-1)
        return ops.tanh(log_s), t

    def call(self, x):
        kept, changed = ops.split(x, 2, axis=-1)
        log_s, t = self.parameters(kept)
        return ops.concatenate([kept, changed * ops.exp(log_s) + t], axis=-1), ops.sum(log_s, axis=-1)

    def inverse(self, z):
        kept, changed = ops.split(z, 2, axis=-1)
        log_s, t = self.parameters(kept)
        return ops.concatenate([kept, (changed - t) * ops.exp(-log_s)], axis=-1)


class Glow(keras.Model):
    def __init__(self, depth, **kwargs):
        super().__init__(**kwargs)
        self.steps = []
        for _ in range(depth):
            self.steps += [ActNorm(), InvertibleLinear(), AffineCoupling()]
        self.bits_per_dim = keras.metrics.Mean(name="bits_per_dim")

    def call(self, x, training=False):
        log_det = ops.zeros_like(x[:, 0])
        for step in self.steps:
            x, change = step(x, training=training) if isinstance(step, ActNorm) else step(x)
            log_det = log_det + change
        return x, log_det

    def log_prob(self, x, training=False):
        z, log_det = self(x, training=training)
        return -0.5 * ops.sum(z**2 + np.log(2 * np.pi), axis=-1) + log_det

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        z, log_det = y_pred
        nll = 0.5 * ops.sum(z**2 + np.log(2 * np.pi), axis=-1) - log_det
        self.bits_per_dim.update_state(nll / (DIM * np.log(2.0)))
        return ops.mean(nll)

    def sample(self, n, seed=0):
        x = ops.convert_to_tensor(np.random.default_rng(seed).normal(size=(n, DIM)), dtype=self.compute_dtype)
        for step in reversed(self.steps):
            x = step.inverse(x)
        return ops.convert_to_numpy(x)


# Two moons, with two dimensions more which depend on them
moons = make_moons(420, noise=0.06, random_state=0)[0]
data = np.concatenate([moons, np.sin(2 * moons) + np.random.normal(0, 0.1, moons.shape)], axis=1)
data = 3.0 * data + 1.0  # not normalized: ActNorm will see to it
train, test = data[:350], data[350:]

flow = Glow(depth=3)
flow.compile(optimizer=keras.optimizers.Adamax(5e-3))
history = flow.fit(train, epochs=4, batch_size=64, validation_data=(test,), verbose=2)

z, log_det = flow.predict(test, batch_size=32, verbose=0)
samples = flow.sample(200)
print("NLL:", history.history["loss"])
print("Bits per dimension:", history.history["bits_per_dim"], history.history["val_bits_per_dim"])
print("Evaluation:", flow.evaluate(test, batch_size=35, verbose=0, return_dict=True))
print("Latents of the test set:", z.mean(axis=0), z.std(axis=0), "log det:", float(log_det.mean()))
print("Data:", data.mean(axis=0), "samples:", samples.mean(axis=0))
