"""Strings of different lengths as ragged tensors, and models with inputs in dicts and nested tuples."""

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(812)

rng = np.random.default_rng(0)
words = "who is dan smith pause will rain later this week what time does the train leave from here today".split()
queries = [[str(word) for word in rng.choice(words, size=rng.integers(2, 9))] for _ in range(130)]
titles = [" ".join(query[:3]) for query in queries]
labels = np.array([query.count("the") + query.count("rain") > 0 for query in queries]).astype("int32")
numbers = rng.normal(size=(130, 3)).astype("float32")

# A ragged tensor holds rows of different lengths.
queries = tf.ragged.constant(queries)

lookup = tf.keras.layers.StringLookup()
lookup.adapt(queries.flat_values)
print(lookup(queries[:2]))

vectorizer = tf.keras.layers.TextVectorization(output_mode="int", ragged=True)
vectorizer.adapt(titles)
print(vectorizer(titles[:3]))


# Words looked up and padded in the data pipeline
def to_padded(words, label):
    return lookup(words).to_tensor(), label


dataset = tf.data.Dataset.from_tensor_slices((queries, labels)).shuffle(200).batch(32).map(to_padded)
keras_model = tf.keras.Sequential(
    [
        tf.keras.layers.Embedding(lookup.vocabulary_size(), 8, mask_zero=True),
        tf.keras.layers.LSTM(8, use_bias=False),
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.Dense(1),
    ]
)
keras_model.compile(loss=tf.keras.losses.BinaryCrossentropy(from_logits=True), optimizer="rmsprop")
keras_model.fit(dataset, epochs=2)
print(keras_model.predict(lookup(queries[:3]).to_tensor()))


# The titles become ragged rows of numbers, in a model that makes them dense by itself.
class TitleClassifier(tf.keras.Model):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(vocabulary_size, 8)
        self.pooling = tf.keras.layers.GlobalAveragePooling1D()
        self.classifier = tf.keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        tokens = vectorizer(inputs["title"]).to_tensor()
        mask = tf.not_equal(tokens, 0)
        return self.classifier(self.pooling(self.embedding(tokens), mask=mask))


title_ds = tf.data.Dataset.from_tensor_slices(({"title": titles}, labels)).batch(24).prefetch(tf.data.AUTOTUNE)
title_model = TitleClassifier(vectorizer.vocabulary_size())
title_model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
title_model.fit(title_ds, epochs=2)

# A functional model whose inputs are a tuple of words and a dict with a tuple in it
words_input = tf.keras.Input(shape=(None,), dtype="int64", name="words")
title_input = tf.keras.Input(shape=(None,), dtype="int64", name="title")
first_number = tf.keras.Input(shape=(1,), name="first_number")
other_numbers = tf.keras.Input(shape=(2,), name="other_numbers")
inputs = (words_input, {"title": title_input, "numbers": (first_number, other_numbers)})

embedding = tf.keras.layers.Embedding(lookup.vocabulary_size() + vectorizer.vocabulary_size(), 8, mask_zero=True)
x = tf.keras.layers.Concatenate()(
    [
        tf.keras.layers.GRU(6)(embedding(words_input)),
        tf.keras.layers.GlobalAveragePooling1D()(embedding(title_input)),
        first_number,
        other_numbers,
    ]
)
x = tf.keras.layers.Dropout(0.2)(tf.keras.layers.Dense(8, activation="relu")(x))
outputs = {"label": tf.keras.layers.Dense(1, activation="sigmoid", name="label")(x)}
model = tf.keras.Model(inputs, outputs)
model.summary()


def to_nested(words, title, first, others, label):
    return (lookup(words).to_tensor(), {"title": vectorizer(title).to_tensor(), "numbers": (first, others)}), {
        "label": label
    }


nested_ds = tf.data.Dataset.from_tensor_slices((queries, titles, numbers[:, :1], numbers[:, 1:], labels[:, None]))
nested_ds = (
    nested_ds.shuffle(200).batch(32).map(to_nested, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
)
model.compile(loss={"label": "binary_crossentropy"}, optimizer="adam", metrics={"label": ["accuracy"]})
model.fit(nested_ds, epochs=2)
print(model.evaluate(nested_ds, return_dict=True), model.predict(nested_ds)["label"].shape)
