"""Deep & Cross network on a table of adverts: FeatureSpace for the features, StringLookup for the labels."""

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from keras import layers
from keras.utils import FeatureSpace

keras.utils.set_random_seed(2)

n_rows = 330
rng = np.random.default_rng(11)
df = pd.DataFrame(
    {
        "age": rng.integers(16, 80, n_rows),
        "income": np.round(rng.lognormal(3.0, 0.4, n_rows), 2),
        "hours": rng.normal(size=n_rows),
        "device": rng.choice(["phone", "tablet", "desktop"], n_rows, p=[0.6, 0.1, 0.3]),
        "city": rng.choice(["Oslo", "Lima", "Pune", "Rome", "Kobe", "Bonn"], n_rows),
        "weekday": rng.integers(0, 7, n_rows),
    }
)
score = (df.device == "phone") * 1.2 + (df.age - 45) / 20 * np.where(df.city.isin(["Oslo", "Rome"]), 1, -1) + df.hours
df["target"] = np.where(score + rng.normal(0, 0.3, n_rows) > 0.5, "click", "skip")

val_dataframe = df.sample(frac=0.2, random_state=1337)
train_dataframe = df.drop(val_dataframe.index)

label_lookup = layers.StringLookup(vocabulary=["skip", "click"], num_oov_indices=0)


def dataframe_to_dataset(dataframe):
    dataframe = dataframe.copy()
    labels = label_lookup(dataframe.pop("target").to_numpy(dtype=str))
    ds = tf.data.Dataset.from_tensor_slices(({name: column.to_numpy() for name, column in dataframe.items()}, labels))
    return ds.shuffle(buffer_size=len(dataframe), seed=3)


for column in ("device", "city"):
    df[column] = train_dataframe[column] = train_dataframe[column].astype(object)
    val_dataframe[column] = val_dataframe[column].astype(object)
train_ds = dataframe_to_dataset(train_dataframe).batch(32)
val_ds = dataframe_to_dataset(val_dataframe).batch(32)

feature_space = FeatureSpace(
    features={
        "device": FeatureSpace.string_categorical(num_oov_indices=0),
        "city": FeatureSpace.string_categorical(num_oov_indices=1),
        "weekday": FeatureSpace.integer_categorical(num_oov_indices=0),
        "age": FeatureSpace.float_discretized(num_bins=6),
        "income": FeatureSpace.float_normalized(),
        "hours": FeatureSpace.float_rescaled(scale=0.5),
    },
    crosses=[FeatureSpace.cross(feature_names=("device", "city"), crossing_dim=16)],
    output_mode="concat",
)
feature_space.adapt(train_ds.map(lambda x, _: x))

preprocessed_train_ds = train_ds.map(lambda x, y: (feature_space(x), y), num_parallel_calls=tf.data.AUTOTUNE).prefetch(
    tf.data.AUTOTUNE
)
preprocessed_val_ds = val_ds.map(lambda x, y: (feature_space(x), y), num_parallel_calls=tf.data.AUTOTUNE)


class CrossLayer(layers.Layer):
    """x_{l+1} = x_0 * (W x_l + b) + x_l, with W of low rank."""

    def __init__(self, projection_dim=8, **kwargs):
        super().__init__(**kwargs)
        self.projection_dim = projection_dim

    def build(self, input_shape):
        last_dim = input_shape[0][-1]
        self.u = self.add_weight(shape=(last_dim, self.projection_dim), initializer="truncated_normal", name="u")
        self.v = self.add_weight(shape=(self.projection_dim, last_dim), initializer="truncated_normal", name="v")
        self.bias = self.add_weight(shape=(last_dim,), initializer="zeros", name="bias")

    def call(self, inputs):
        x0, x = inputs
        return x0 * (keras.ops.matmul(keras.ops.matmul(x, self.u), self.v) + self.bias) + x


dict_inputs = feature_space.get_inputs()
encoded_features = feature_space.get_encoded_features()

cross = encoded_features
for _ in range(2):
    cross = CrossLayer()([encoded_features, cross])
cross = layers.BatchNormalization()(cross)
deep = encoded_features
for units in (32, 16):
    deep = layers.Dense(units)(deep)
    deep = layers.BatchNormalization()(deep)
    deep = layers.ReLU()(deep)
    deep = layers.Dropout(0.2)(deep)
predictions = layers.Dense(1, activation="sigmoid")(layers.concatenate([cross, deep]))

training_model = keras.Model(inputs=encoded_features, outputs=predictions)
inference_model = keras.Model(inputs=dict_inputs, outputs=predictions)
training_model.compile(optimizer=keras.optimizers.Adam(0.005), loss="binary_crossentropy", metrics=["accuracy"])

training_model.fit(preprocessed_train_ds, epochs=3, validation_data=preprocessed_val_ds, verbose=2)

sample = {"age": 60, "income": 25.0, "hours": 0.4, "device": "phone", "city": "Oslo", "weekday": 1}
input_dict = {name: tf.convert_to_tensor([value]) for name, value in sample.items()}
clicks = inference_model.predict(input_dict, verbose=0)

inference_model.compile(loss="binary_crossentropy", metrics=["accuracy", "auc"])
print("End to end on raw values:", inference_model.evaluate(val_ds, verbose=0, return_dict=True))
