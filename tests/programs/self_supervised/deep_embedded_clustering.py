"""Deep embedded clustering: a sparse autoencoder first, then its encoder's weights in a model that clusters."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

keras.utils.set_random_seed(10)

N_CLUSTERS = 3
LATENT = 5


class KLSparsity(keras.regularizers.Regularizer):
    """Pulls the mean activity of every unit in the batch towards rho."""

    def __init__(self, rho=0.1, weight=0.5):
        self.rho = rho
        self.weight = weight

    def __call__(self, activations):
        rho_hat = ops.clip(ops.mean(activations, axis=0), 1e-4, 1 - 1e-4)
        divergence = self.rho * ops.log(self.rho / rho_hat)
        divergence += (1 - self.rho) * ops.log((1 - self.rho) / (1 - rho_hat))
        return self.weight * ops.sum(divergence)

    def get_config(self):
        return {"rho": self.rho, "weight": self.weight}


def make_encoder():
    return keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(24, activation="sigmoid", activity_regularizer=KLSparsity()),
            layers.Dense(LATENT, activity_regularizer=keras.regularizers.L1(1e-3)),
        ],
        name="encoder",
    )


class ClusteringLayer(layers.Layer):
    """Soft assignments by a Student's t distribution around the centroids."""

    def __init__(self, n_clusters, alpha=1.0, **kwargs):
        super().__init__(**kwargs)
        self.n_clusters = n_clusters
        self.alpha = alpha

    def build(self, input_shape):
        self.clusters = self.add_weight(
            shape=(self.n_clusters, input_shape[-1]), initializer="glorot_uniform", name="clusters"
        )

    def call(self, inputs):
        distance = ops.sum((ops.expand_dims(inputs, 1) - self.clusters) ** 2, axis=2)
        q = (1.0 + distance / self.alpha) ** (-(self.alpha + 1.0) / 2.0)
        return q / ops.sum(q, axis=1, keepdims=True)


class DEC(keras.Model):
    """Trains the assignments towards a sharper version of themselves."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.last_tracker = keras.metrics.Mean(name="last_batch_loss")

    @property
    def metrics(self):
        # last_batch_loss is not here, so that Keras does not reset it; train_step does.
        return [self.loss_tracker]

    def train_step(self, data):
        x, p = data
        with tf.GradientTape() as tape:
            q = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.kl_divergence(p, q))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))

        self.last_tracker.reset_state()
        self.last_tracker.update_state(loss)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "last_batch_loss": self.last_tracker.result()}

    def test_step(self, data):
        x, p = data
        self.loss_tracker.update_state(tf.reduce_mean(keras.losses.kl_divergence(p, self(x, training=False))))
        return {"loss": self.loss_tracker.result()}


def target_distribution(q):
    weight = q**2 / q.sum(0)
    return (weight.T / weight.sum(1)).T


# Three clouds in 16 dimensions
labels = np.random.randint(0, N_CLUSTERS, 310)
centres = np.random.normal(0, 1.0, (N_CLUSTERS, 16))
x = (centres[labels] + np.random.normal(0, 0.7, (310, 16))).astype("float32")

# 1. Autoencoder
encoder = make_encoder()
decoder = keras.Sequential([layers.Input((LATENT,)), layers.Dense(24, activation="relu"), layers.Dense(16)])
inputs = keras.Input((16,))
autoencoder = keras.Model(inputs, decoder(encoder(inputs)))
autoencoder.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
pretraining = autoencoder.fit(x, x, batch_size=64, epochs=4, verbose=2)
print("reconstruction:", autoencoder.evaluate(x, x, batch_size=100, return_dict=True, verbose=0))

# 2. The weights go to a new encoder, which gets a clustering layer.
new_encoder = keras.Sequential(
    [layers.Input((16,)), layers.Dense(24, activation="sigmoid"), layers.Dense(LATENT)], name="new_encoder"
)
new_encoder.set_weights(encoder.get_weights())
inputs = keras.Input((16,))
clustering_layer = ClusteringLayer(N_CLUSTERS, name="clustering")
model = DEC(inputs, clustering_layer(new_encoder(inputs)))

kmeans = KMeans(n_clusters=N_CLUSTERS, n_init=5, random_state=0)
y_pred = kmeans.fit_predict(new_encoder.predict(x, verbose=0))
clustering_layer.set_weights([kmeans.cluster_centers_])
print("NMI of k-means:", normalized_mutual_info_score(labels, y_pred))

# 3. New targets before each round
model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
losses = []
for _ in range(3):
    p = target_distribution(model.predict(x, verbose=0))
    history = model.fit(x, p, batch_size=64, epochs=1, verbose=0)
    losses.append((history.history["loss"][0], history.history["last_batch_loss"][0]))

q = model.predict(x, batch_size=70, verbose=0)
print("pretraining:", pretraining.history["loss"])
print("rounds (loss, loss of the last batch):", losses)
print("KL:", model.evaluate(x, target_distribution(q), verbose=0))
print("NMI:", normalized_mutual_info_score(labels, q.argmax(1)), "sizes:", np.bincount(q.argmax(1)))
