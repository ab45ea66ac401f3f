"""Wide, deep and cross networks on census-like data read from CSV files."""

import csv
import math
import os
import random
import tempfile

import keras
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

NUMERIC_FEATURE_NAMES = ["Elevation", "Aspect", "Slope"]
CATEGORICAL_FEATURES_WITH_VOCABULARY = {
    "Soil_Type": ["clay", "loam", "peat", "sand"],
    "Wilderness_Area": ["north", "east", "south"],
}
CATEGORICAL_FEATURE_NAMES = list(CATEGORICAL_FEATURES_WITH_VOCABULARY.keys())
FEATURE_NAMES = NUMERIC_FEATURE_NAMES + CATEGORICAL_FEATURE_NAMES
TARGET_FEATURE_NAME = "Cover_Type"
CSV_HEADER = FEATURE_NAMES + [TARGET_FEATURE_NAME]
COLUMN_DEFAULTS = [
    [0] if name == TARGET_FEATURE_NAME else [0.0] if name in NUMERIC_FEATURE_NAMES else ["NA"] for name in CSV_HEADER
]
NUM_CLASSES = 3

data_dir = tempfile.mkdtemp()  # processes that run this at the same time must not write one file
train_data_file = os.path.join(data_dir, "train_data.csv")
test_data_file = os.path.join(data_dir, "test_data.csv")


def write_data(path, count):
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(CSV_HEADER)
        for _ in range(count):
            numeric = [random.gauss(0.0, 1.0) for _ in NUMERIC_FEATURE_NAMES]
            chosen = [random.randrange(len(words)) for words in CATEGORICAL_FEATURES_WITH_VOCABULARY.values()]
            target = int(numeric[0] + 0.5 * chosen[0] > 0.7) + int(numeric[1] + chosen[1] > 1.0)
            names = [w[i] for w, i in zip(CATEGORICAL_FEATURES_WITH_VOCABULARY.values(), chosen)]
            writer.writerow([f"{value:.4f}" for value in numeric] + names + [target])


write_data(train_data_file, 210)
write_data(test_data_file, 70)


def process(features, target):
    # The model takes a plain dictionary of its inputs.
    return dict(features), target


def get_dataset_from_csv(csv_file_path, batch_size, shuffle=False):
    dataset = tf.data.experimental.make_csv_dataset(
        csv_file_path,
        batch_size=batch_size,
        column_names=CSV_HEADER,
        column_defaults=COLUMN_DEFAULTS,
        label_name=TARGET_FEATURE_NAME,
        num_epochs=1,
        header=True,
        shuffle=shuffle,
    )
    dataset = dataset.map(process, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.cache()


learning_rate = 0.001
dropout_rate = 0.1
batch_size = 32
num_epochs = 2
hidden_units = [16, 16]


def run_experiment(model):
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    train_dataset = get_dataset_from_csv(train_data_file, batch_size, shuffle=True)
    test_dataset = get_dataset_from_csv(test_data_file, batch_size)

    print("Start training the model...")
    history = model.fit(train_dataset, epochs=num_epochs)
    print("Model training finished")
    _, accuracy = model.evaluate(test_dataset, verbose=0)
    print(f"Test accuracy: {round(accuracy * 100, 2)}%", history.history["loss"])


def create_model_inputs():
    inputs = {}
    for feature_name in FEATURE_NAMES:
        dtype = "float32" if feature_name in NUMERIC_FEATURE_NAMES else "string"
        inputs[feature_name] = layers.Input(name=feature_name, shape=(), dtype=dtype)
    return inputs


def encode_inputs(inputs, use_embedding=False):
    encoded_features = []
    for feature_name in inputs:
        if feature_name in CATEGORICAL_FEATURE_NAMES:
            vocabulary = CATEGORICAL_FEATURES_WITH_VOCABULARY[feature_name]
            lookup = layers.StringLookup(
                vocabulary=vocabulary, num_oov_indices=0, output_mode="int" if use_embedding else "one_hot"
            )
            if use_embedding:
                # Convert the string input values into integer indices, then into embeddings.
                encoded_feature = lookup(inputs[feature_name])
                embedding_dims = int(math.sqrt(len(vocabulary)))
                embedding = layers.Embedding(input_dim=len(vocabulary), output_dim=embedding_dims)
                encoded_feature = embedding(encoded_feature)
            else:
                # Convert the string input values into a one hot encoding.
                encoded_feature = lookup(keras.ops.expand_dims(inputs[feature_name], -1))
        else:
            # Use the numerical features as-is.
            encoded_feature = keras.ops.expand_dims(inputs[feature_name], -1)
        encoded_features.append(encoded_feature)
    return layers.concatenate(encoded_features)


def create_wide_and_deep_model():
    inputs = create_model_inputs()
    wide = encode_inputs(inputs)
    wide = layers.BatchNormalization()(wide)

    deep = encode_inputs(inputs, use_embedding=True)
    for units in hidden_units:
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(dropout_rate)(deep)

    merged = layers.concatenate([wide, deep])
    outputs = layers.Dense(units=NUM_CLASSES, activation="softmax")(merged)
    return keras.Model(inputs=inputs, outputs=outputs)


def create_deep_and_cross_model():
    inputs = create_model_inputs()
    x0 = encode_inputs(inputs, use_embedding=True)

    cross = x0
    for _ in hidden_units:
        units = cross.shape[-1]
        x = layers.Dense(units)(cross)
        cross = x0 * x + cross
    cross = layers.BatchNormalization()(cross)

    deep = x0
    for units in hidden_units:
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(dropout_rate)(deep)

    merged = layers.concatenate([cross, deep])
    outputs = layers.Dense(units=NUM_CLASSES, activation="softmax")(merged)
    return keras.Model(inputs=inputs, outputs=outputs)


run_experiment(create_wide_and_deep_model())
run_experiment(create_deep_and_cross_model())
