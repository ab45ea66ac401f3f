"""Ratings predicted from the sequence of a user's movies with a Transformer."""

import math
import os
import random
import tempfile

import keras
import tensorflow as tf
from keras import layers
from keras.layers import StringLookup

keras.utils.set_random_seed(812)

MOVIES = [f"movie_{i}" for i in range(20)]
USERS = [f"user_{i}" for i in range(15)]
CSV_HEADER = ["user_id", "sequence_movie_ids", "sequence_ratings", "sex", "age_group"]
USER_FEATURES = ["sex", "age_group"]
CATEGORICAL_FEATURES_WITH_VOCABULARY = {
    "user_id": USERS,
    "movie_id": MOVIES,
    "sex": ["F", "M"],
    "age_group": ["group_18", "group_25", "group_35"],
}
sequence_length = 5


def to_csv(path, count):
    with open(path, "w") as f:
        for _ in range(count):
            user = random.randrange(len(USERS))
            sequence = random.sample(range(len(MOVIES)), sequence_length)
            ratings = [1.0 + (movie * 3 + user) % 5 for movie in sequence]
            fields = [USERS[user], ",".join(MOVIES[i] for i in sequence), ",".join(str(r) for r in ratings)]
            f.write("|".join(fields + ["FM"[user % 2], ["group_18", "group_25", "group_35"][user % 3]]) + "\n")


data_dir = tempfile.mkdtemp()  # processes that run this at the same time must not write one file
to_csv(os.path.join(data_dir, "train_data.csv"), 170)
to_csv(os.path.join(data_dir, "test_data.csv"), 50)


def get_dataset_from_csv(csv_file_path, shuffle=False, batch_size=128):
    def process(features):
        movie_ids_string = features["sequence_movie_ids"]
        sequence_movie_ids = tf.strings.split(movie_ids_string, ",").to_tensor()

        # The last movie id in the sequence is the target movie.
        features["target_movie_id"] = sequence_movie_ids[:, -1]
        features["sequence_movie_ids"] = sequence_movie_ids[:, :-1]

        ratings_string = features["sequence_ratings"]
        sequence_ratings = tf.strings.to_number(tf.strings.split(ratings_string, ","), tf.dtypes.float32).to_tensor()

        # The last rating in the sequence is the target for the model to predict.
        target = sequence_ratings[:, -1]
        features["sequence_ratings"] = sequence_ratings[:, :-1]
        return dict(features), target

    dataset = tf.data.experimental.make_csv_dataset(
        csv_file_path,
        batch_size=batch_size,
        column_names=CSV_HEADER,
        num_epochs=1,
        header=False,
        field_delim="|",
        shuffle=shuffle,
    ).map(process)
    return dataset


def create_model_inputs():
    return {
        "user_id": keras.Input(name="user_id", shape=(1,), dtype="string"),
        "sequence_movie_ids": keras.Input(name="sequence_movie_ids", shape=(sequence_length - 1,), dtype="string"),
        "target_movie_id": keras.Input(name="target_movie_id", shape=(1,), dtype="string"),
        "sequence_ratings": keras.Input(name="sequence_ratings", shape=(sequence_length - 1,), dtype="float32"),
        "sex": keras.Input(name="sex", shape=(1,), dtype="string"),
        "age_group": keras.Input(name="age_group", shape=(1,), dtype="string"),
    }


def encode_input_features(inputs):
    encoded_other_features = []
    for feature_name in ["user_id"] + USER_FEATURES:
        vocabulary = CATEGORICAL_FEATURES_WITH_VOCABULARY[feature_name]
        idx = StringLookup(vocabulary=vocabulary, mask_token=None, num_oov_indices=0)(inputs[feature_name])
        embedding_encoder = layers.Embedding(
            len(vocabulary), int(math.sqrt(len(vocabulary))), name=f"{feature_name}_embedding"
        )
        encoded_other_features.append(layers.Flatten()(embedding_encoder(idx)))
    encoded_other_features = layers.concatenate(encoded_other_features)

    # The same lookup and embedding for the sequence and for the target
    movie_vocabulary = CATEGORICAL_FEATURES_WITH_VOCABULARY["movie_id"]
    movie_embedding_dims = 4
    movie_index_lookup = StringLookup(vocabulary=movie_vocabulary, mask_token=None, num_oov_indices=0)
    movie_embedding_encoder = layers.Embedding(len(movie_vocabulary), movie_embedding_dims, name="movie_embedding")

    encoded_target_movie = movie_embedding_encoder(movie_index_lookup(inputs["target_movie_id"]))
    encoded_sequence_movies = movie_embedding_encoder(movie_index_lookup(inputs["sequence_movie_ids"]))

    positions = keras.ops.arange(start=0, stop=sequence_length - 1, step=1)
    encoded_positions = layers.Embedding(sequence_length, movie_embedding_dims, name="position_embedding")(positions)
    sequence_ratings = keras.ops.expand_dims(inputs["sequence_ratings"], -1)
    # Add the positional encoding to the movie encodings and multiply them by rating.
    encoded_sequence_movies_with_position_and_rating = layers.Multiply()(
        [(encoded_sequence_movies + encoded_positions), sequence_ratings]
    )
    encoded_transformer_features = layers.concatenate(
        [encoded_sequence_movies_with_position_and_rating, encoded_target_movie], axis=1
    )
    return encoded_transformer_features, encoded_other_features


hidden_units = [16, 8]
dropout_rate = 0.1
num_heads = 2


def create_model():
    inputs = create_model_inputs()
    transformer_features, other_features = encode_input_features(inputs)

    attention_output = layers.MultiHeadAttention(
        num_heads=num_heads, key_dim=transformer_features.shape[2], dropout=dropout_rate
    )(transformer_features, transformer_features)

    # Transformer block.
    attention_output = layers.Dropout(dropout_rate)(attention_output)
    x1 = layers.Add()([transformer_features, attention_output])
    x1 = layers.LayerNormalization()(x1)
    x2 = layers.LeakyReLU()(x1)
    x2 = layers.Dense(units=x2.shape[-1])(x2)
    x2 = layers.Dropout(dropout_rate)(x2)
    transformer_features = layers.Add()([x1, x2])
    transformer_features = layers.LayerNormalization()(transformer_features)
    features = layers.Flatten()(transformer_features)

    # Included the other features.
    features = layers.concatenate([features, other_features])
    for num_units in hidden_units:
        features = layers.Dense(num_units)(features)
        features = layers.BatchNormalization()(features)
        features = layers.LeakyReLU()(features)
        features = layers.Dropout(dropout_rate)(features)
    outputs = layers.Dense(units=1)(features)
    return keras.Model(inputs=inputs, outputs=outputs)


model = create_model()
model.compile(
    optimizer=keras.optimizers.Adagrad(learning_rate=0.01),
    loss=keras.losses.MeanSquaredError(),
    metrics=[keras.metrics.MeanAbsoluteError()],
)
train_dataset = get_dataset_from_csv(os.path.join(data_dir, "train_data.csv"), shuffle=True, batch_size=32)
history = model.fit(train_dataset, epochs=3)

test_dataset = get_dataset_from_csv(os.path.join(data_dir, "test_data.csv"), batch_size=32)
_, mae = model.evaluate(test_dataset, verbose=0)
print(f"Test MAE: {round(mae, 3)}", history.history["loss"])
