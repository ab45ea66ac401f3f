"""A mixture density network on an inverse problem, with Monte Carlo dropout for the uncertainty of the model."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(7)

N_MIXES = 4
OUTPUT_DIMS = 1

# The usual toy data, with x and y exchanged: several y for each x.
n = 430
y_data = np.random.uniform(-10.5, 10.5, (n, 1))
x_data = np.sin(0.75 * y_data) * 7.0 + y_data * 0.5 + np.random.normal(size=(n, 1))
x_train, y_train = x_data[:350] / 10, y_data[:350] / 10
x_test, y_test = x_data[350:] / 10, y_data[350:] / 10


def elu_plus_one_plus_epsilon(x):
    """ELU activation with a very small addition to help prevent NaN in loss."""
    return keras.ops.elu(x) + 1 + keras.backend.epsilon()


class MDN(layers.Layer):
    def __init__(self, output_dim, num_mix, **kwargs):
        super().__init__(**kwargs)
        self.output_dim = output_dim
        self.num_mix = num_mix
        self.mdn_mus = layers.Dense(num_mix * output_dim, name="mdn_mus")
        self.mdn_sigmas = layers.Dense(num_mix * output_dim, activation=elu_plus_one_plus_epsilon, name="mdn_sigmas")
        self.mdn_pi = layers.Dense(num_mix, name="mdn_pi")

    def build(self, input_shape):
        self.mdn_mus.build(input_shape)
        self.mdn_sigmas.build(input_shape)
        self.mdn_pi.build(input_shape)
        super().build(input_shape)

    def call(self, x):
        return keras.ops.concatenate([self.mdn_mus(x), self.mdn_sigmas(x), self.mdn_pi(x)], axis=-1)


class MCDropout(layers.Dropout):
    """Dropout that stays on when the model predicts."""

    def call(self, inputs):
        return super().call(inputs, training=True)


def get_mixture_loss_func(output_dim, num_mixes):
    def mdn_loss_func(y_true, y_pred):
        mus, sigmas, logits = tf.split(y_pred, [num_mixes * output_dim, num_mixes * output_dim, num_mixes], axis=-1)
        mus = tf.reshape(mus, (-1, num_mixes, output_dim))
        sigmas = tf.reshape(sigmas, (-1, num_mixes, output_dim))
        y_true = tf.cast(tf.reshape(y_true, (-1, 1, output_dim)), y_pred.dtype)
        log_prob = -0.5 * tf.square((y_true - mus) / sigmas) - tf.math.log(sigmas) - 0.5 * np.log(2 * np.pi)
        log_prob = tf.reduce_sum(log_prob, axis=-1) + tf.nn.log_softmax(logits)
        return tf.reduce_mean(-tf.reduce_logsumexp(log_prob, axis=-1))

    return mdn_loss_func


def split_mixture_params(params):
    mus = params[:, :N_MIXES]
    sigmas = params[:, N_MIXES : 2 * N_MIXES]
    logits = params[:, 2 * N_MIXES :]
    pis = np.exp(logits - logits.max(axis=1, keepdims=True))
    return mus, sigmas, pis / pis.sum(axis=1, keepdims=True)


mdn_network = keras.Sequential(
    [
        layers.Input((1,)),
        layers.Dense(32, activation="relu"),
        MCDropout(0.05),
        layers.Dense(32, activation="relu"),
        MCDropout(0.05),
        MDN(OUTPUT_DIMS, N_MIXES),
    ]
)
mdn_network.compile(loss=get_mixture_loss_func(OUTPUT_DIMS, N_MIXES), optimizer=keras.optimizers.Adam(0.01))
mdn_network.summary()

history = mdn_network.fit(x=x_train, y=y_train, batch_size=64, epochs=4, validation_split=0.15, verbose=2)

# Evaluated on batches of another size than those of the training.
results = mdn_network.evaluate(x_test, y_test, batch_size=30, return_dict=True, verbose=0)
whole = mdn_network.evaluate(x_test, y_test, batch_size=len(x_test), return_dict=True, verbose=0)

# Many predictions of the same inputs: the spread of their means is what the model does not know.
means = []
aleatoric = []
for _ in range(8):
    mus, sigmas, pis = split_mixture_params(mdn_network.predict(x_test, batch_size=33, verbose=0))
    mean = (pis * mus).sum(axis=1)
    means.append(mean)
    aleatoric.append((pis * (sigmas**2 + (mus - mean[:, None]) ** 2)).sum(axis=1))

# The same with a call of the model
direct = np.stack([np.asarray(mdn_network(x_test[:10], training=True)) for _ in range(3)])

print("NLL:", history.history["loss"])
print("Validation NLL:", history.history["val_loss"])
print("Test NLL by batches of 30 and at once:", results["loss"], whole["loss"])
print("Epistemic std:", float(np.std(means, axis=0).mean()), "aleatoric std:", float(np.sqrt(aleatoric).mean()))
print("Shape of direct calls:", direct.shape)
