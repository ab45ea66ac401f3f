"""Sentiment classification starting from raw text files on disk."""

import os
import random
import re
import string
import tempfile

import keras
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

GOOD = ["great", "wonderful", "moving", "brilliant", "funny", "superb"]
BAD = ["boring", "awful", "dull", "terrible", "weak", "clumsy"]
COMMON = ["the", "movie", "was", "and", "its", "story", "acting", "a", "plot", "of", "ending", "cast"]


def write_reviews(directory, count):
    for label, words in (("neg", BAD), ("pos", GOOD)):
        os.makedirs(os.path.join(directory, label), exist_ok=True)
        for i in range(count):
            review = [random.choice(COMMON + words) for _ in range(random.randint(8, 18))]
            review.insert(3, random.choice(words).upper() + ",<br />")
            with open(os.path.join(directory, label, f"{i}.txt"), "w") as f:
                f.write(" ".join(review) + ".")


data_dir = tempfile.mkdtemp()  # processes that run this at the same time must not write one file
write_reviews(os.path.join(data_dir, "aclImdb/train"), 75)
write_reviews(os.path.join(data_dir, "aclImdb/test"), 25)

batch_size = 32
raw_train_ds, raw_val_ds = keras.utils.text_dataset_from_directory(
    os.path.join(data_dir, "aclImdb/train"), batch_size=batch_size, validation_split=0.2, subset="both", seed=1337
)
raw_test_ds = keras.utils.text_dataset_from_directory(os.path.join(data_dir, "aclImdb/test"), batch_size=batch_size)


def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, f"[{re.escape(string.punctuation)}]", "")


max_features = 60
embedding_dim = 8
sequence_length = 20

vectorize_layer = layers.TextVectorization(
    standardize=custom_standardization,
    max_tokens=max_features,
    output_mode="int",
    output_sequence_length=sequence_length,
)
text_ds = raw_train_ds.map(lambda x, y: x)
vectorize_layer.adapt(text_ds)


def vectorize_text(text, label):
    text = tf.expand_dims(text, -1)
    return vectorize_layer(text), label


train_ds = raw_train_ds.map(vectorize_text)
val_ds = raw_val_ds.map(vectorize_text)
test_ds = raw_test_ds.map(vectorize_text)

train_ds = train_ds.cache().prefetch(buffer_size=10)
val_ds = val_ds.cache().prefetch(buffer_size=10)
test_ds = test_ds.cache().prefetch(buffer_size=10)

inputs = keras.Input(shape=(None,), dtype="int64")
x = layers.Embedding(max_features, embedding_dim)(inputs)
x = layers.Dropout(0.5)(x)
x = layers.Conv1D(16, 5, padding="valid", activation="relu", strides=2)(x)
x = layers.Conv1D(16, 5, padding="valid", activation="relu", strides=2)(x)
x = layers.GlobalMaxPooling1D()(x)
x = layers.Dense(16, activation="relu")(x)
x = layers.Dropout(0.5)(x)
predictions = layers.Dense(1, activation="sigmoid", name="predictions")(x)

model = keras.Model(inputs, predictions)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
model.summary()

epochs = 3
model.fit(train_ds, validation_data=val_ds, epochs=epochs)
print("Test:", model.evaluate(test_ds))

inputs = keras.Input(shape=(1,), dtype="string")
indices = vectorize_layer(inputs)
outputs = model(indices)

end_to_end_model = keras.Model(inputs, outputs)
end_to_end_model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
print("End to end:", end_to_end_model.evaluate(raw_test_ds))
