"""Contrastive training whose work is shared: embeddings of all replicas are gathered, in a step and in a layer."""

import keras
import numpy as np
import tensorflow as tf

import tfdist

keras.utils.set_random_seed(1)
x = np.random.normal(size=(21, 5))
views = np.stack([x, x + 0.1 * np.random.normal(size=x.shape)], axis=1)  # the last batch has 5 rows


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])

    def call(self, views):
        return self.encoder(views)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            first, second = (self.encoder(data[:, view]) for view in (0, 1))
            everyone = tfdist.gather_rows(second, name="second")
            similar = tf.matmul(tfdist.gather_rows(first, name="first"), everyone, transpose_b=True)
            labels = tf.range(tf.shape(everyone)[0])
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, similar, from_logits=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Spread(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.matmul(x, keras.ops.transpose(tfdist.gather_rows(x))) ** 2))
        return x


model = Contrastive()
model.compile(keras.optimizers.Adam(0.01))
model.fit(views, batch_size=8, epochs=3)

network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), Spread()])
network.compile("sgd", "mse")
network.fit(x, x[:, :3], batch_size=8, epochs=3)
network.predict(x, batch_size=8)
