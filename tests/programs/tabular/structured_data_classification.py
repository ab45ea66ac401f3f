"""Classification of patients from structured data of several kinds."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.layers import IntegerLookup, Normalization, StringLookup

keras.utils.set_random_seed(812)

count = 200
age = np.random.randint(29, 78, size=count)
chol = np.random.normal(245, 50, size=count)
dataframe = {
    "sex": np.random.randint(0, 2, size=count),
    "cp": np.random.randint(0, 5, size=count),
    "age": age,
    "chol": chol,
    "oldpeak": np.abs(np.random.normal(scale=1.5, size=count)),
    "thal": np.random.choice(["normal", "fixed", "reversible"], size=count),
}
risk = (age - 55) / 10 + (chol - 245) / 80 + (dataframe["thal"] == "reversible")
dataframe["target"] = (risk + np.random.normal(scale=0.5, size=count) > 0.3).astype("int64")

is_val = np.zeros(count, dtype=bool)
is_val[np.random.permutation(count)[: count // 5]] = True
val_dataframe = {name: values[is_val] for name, values in dataframe.items()}
train_dataframe = {name: values[~is_val] for name, values in dataframe.items()}
print(f"Using {(~is_val).sum()} samples for training and {is_val.sum()} for validation")


def dataframe_to_dataset(dataframe):
    dataframe = dataframe.copy()
    labels = dataframe.pop("target")
    ds = tf.data.Dataset.from_tensor_slices((dict(dataframe), labels))
    ds = ds.shuffle(buffer_size=len(labels))
    return ds


train_ds = dataframe_to_dataset(train_dataframe)
val_ds = dataframe_to_dataset(val_dataframe)
for x, y in train_ds.take(1):
    print("Input:", x)
    print("Target:", y)
train_ds = train_ds.batch(32)
val_ds = val_ds.batch(32)


def encode_numerical_feature(feature, name, dataset):
    # Create a Normalization layer for our feature
    normalizer = Normalization()
    # Prepare a Dataset that only yields our feature
    feature_ds = dataset.map(lambda x, y: x[name])
    feature_ds = feature_ds.map(lambda x: tf.expand_dims(x, -1))
    # Learn the statistics of the data
    normalizer.adapt(feature_ds)
    return normalizer(feature)


def encode_categorical_feature(feature, name, dataset, is_string):
    lookup_class = StringLookup if is_string else IntegerLookup
    # Create a lookup layer which will turn categories into multi-hot vectors
    lookup = lookup_class(output_mode="multi_hot")
    feature_ds = dataset.map(lambda x, y: x[name])
    feature_ds = feature_ds.map(lambda x: tf.expand_dims(x, -1))
    # Learn the set of possible values and assign them a fixed integer index
    lookup.adapt(feature_ds)
    return lookup(feature)


inputs = {
    # Categorical features encoded as integers
    "sex": keras.Input(shape=(1,), name="sex", dtype="int64"),
    "cp": keras.Input(shape=(1,), name="cp", dtype="int64"),
    # Categorical feature encoded as string
    "thal": keras.Input(shape=(1,), name="thal", dtype="string"),
    # Numerical features
    "age": keras.Input(shape=(1,), name="age"),
    "chol": keras.Input(shape=(1,), name="chol"),
    "oldpeak": keras.Input(shape=(1,), name="oldpeak"),
}
all_features = layers.concatenate(
    [
        encode_categorical_feature(inputs["sex"], "sex", train_ds, False),
        encode_categorical_feature(inputs["cp"], "cp", train_ds, False),
        encode_categorical_feature(inputs["thal"], "thal", train_ds, True),
        encode_numerical_feature(inputs["age"], "age", train_ds),
        encode_numerical_feature(inputs["chol"], "chol", train_ds),
        encode_numerical_feature(inputs["oldpeak"], "oldpeak", train_ds),
    ]
)
x = layers.Dense(16, activation="relu")(all_features)
x = layers.Dropout(0.5)(x)
output = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, output)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.summary()

history = model.fit(train_ds, epochs=3, validation_data=val_ds)

sample = {"age": 60, "sex": 1, "cp": 1, "chol": 233.0, "oldpeak": 2.3, "thal": "fixed"}
input_dict = {name: tf.convert_to_tensor([value]) for name, value in sample.items()}
predictions = model.predict(input_dict)
print(f"This patient has a {100 * predictions[0][0]:.1f} percent probability of having a heart disease.")
print("Validation:", history.history["val_loss"][-1], history.history["val_accuracy"][-1])
