"""Click-through rates with all preprocessing inside the model, and a focal loss for the rare clicks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SEED = 21
keras.utils.set_random_seed(SEED)


@keras.saving.register_keras_serializable(package="ctr")
class FocalLoss(keras.losses.Loss):
    """Lin et al. 2017: easy examples count for less."""

    def __init__(self, gamma=2.0, alpha=0.75, name="focal_loss", **kwargs):
        super().__init__(name=name, **kwargs)
        self.gamma = gamma
        self.alpha = alpha

    def call(self, y_true, y_pred):
        y_true = tf.cast(y_true, y_pred.dtype)
        p = tf.sigmoid(y_pred)
        p_t = y_true * p + (1 - y_true) * (1 - p)
        alpha_t = y_true * self.alpha + (1 - y_true) * (1 - self.alpha)
        cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred)
        return tf.reduce_mean(alpha_t * tf.pow(1 - p_t, self.gamma) * cross_entropy, axis=-1)

    def get_config(self):
        return {**super().get_config(), "gamma": self.gamma, "alpha": self.alpha}


N = 405
rng = np.random.default_rng(SEED)
features = {
    "hour": rng.uniform(0, 24, N).astype("float32"),
    "price": rng.gamma(2.0, 10.0, N).astype("float32"),
    "site": np.array([f"site-{i}.example" for i in rng.zipf(1.6, N) % 50]),
    "slot": rng.choice(["top", "side", "bottom"], N),
    "user": rng.integers(0, 100_000, N),
    "campaign": rng.integers(0, 6, N),
}
logit = -3.2 + 1.5 * (features["slot"] == "top") + 1.2 * (features["hour"] > 18) + 0.6 * (features["campaign"] == 2)
clicks = (rng.random(N) < 1 / (1 + np.exp(-logit - rng.normal(0, 0.3, N)))).astype("float32")[:, None]


def split(low, high):
    return {name: tf.constant(values[low:high]) for name, values in features.items()}, clicks[low:high]


x_train, y_train = split(0, 320)
x_test, y_test = split(320, N)


def build_model():
    inputs = {
        "hour": keras.Input((1,), name="hour"),
        "price": keras.Input((1,), name="price"),
        "site": keras.Input((1,), name="site", dtype="string"),
        "slot": keras.Input((1,), name="slot", dtype="string"),
        "user": keras.Input((1,), name="user", dtype="int64"),
        "campaign": keras.Input((1,), name="campaign", dtype="int64"),
    }
    encoded = []
    hours = layers.Discretization(bin_boundaries=[6.0, 12.0, 18.0, 21.0], name="hour_bins")(inputs["hour"])
    encoded.append(layers.CategoryEncoding(num_tokens=5, output_mode="one_hot")(hours))
    prices = layers.Discretization(num_bins=6, output_mode="one_hot", name="price_bins")
    prices.adapt(x_train["price"])
    encoded.append(prices(inputs["price"]))
    normalization = layers.Normalization(axis=None)
    normalization.adapt(x_train["price"])
    encoded.append(normalization(inputs["price"]))
    sites = layers.Hashing(num_bins=16, salt=7, name="site_hash")(inputs["site"])
    encoded.append(layers.Flatten()(layers.Embedding(16, 4)(sites)))
    users = layers.Hashing(num_bins=32, name="user_hash")(inputs["user"])
    encoded.append(layers.Flatten()(layers.Embedding(32, 4)(users)))
    slots = layers.StringLookup(vocabulary=["top", "side", "bottom"], output_mode="one_hot")(inputs["slot"])
    encoded.append(slots)
    campaigns = layers.CategoryEncoding(num_tokens=6, output_mode="multi_hot")(inputs["campaign"])
    encoded.append(campaigns)
    x = layers.Concatenate()(encoded)
    for units in (24, 12):
        x = layers.Dense(units, activation="relu", kernel_initializer="he_uniform")(x)
        x = layers.Dropout(0.05)(x)
    return keras.Model(inputs, layers.Dense(1, bias_initializer=keras.initializers.Constant(-1.5))(x))


model = build_model()
model.compile(
    optimizer=keras.optimizers.Adagrad(0.05),
    loss=FocalLoss(),
    metrics=[
        keras.metrics.AUC(from_logits=True, name="auc"),
        keras.metrics.AUC(from_logits=True, curve="PR", name="pr_auc"),
        keras.metrics.RecallAtPrecision(0.3, name="recall_at_p30"),
        keras.metrics.BinaryCrossentropy(from_logits=True, name="bce"),
    ],
)
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(400, seed=SEED).batch(50)
test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(50)
model.fit(dataset, epochs=3, validation_data=test_dataset, verbose=2)

evaluated = model.evaluate(test_dataset, return_dict=True, verbose=0)
model.save("ctr.keras")
restored = keras.models.load_model("ctr.keras")
print(evaluated)
print(restored.evaluate(test_dataset.unbatch().batch(17), return_dict=True, verbose=0))
some = {name: values[:5] for name, values in x_test.items()}
print("p(click):", 1 / (1 + np.exp(-model.predict(tf.data.Dataset.from_tensors(some), verbose=0).ravel())))
