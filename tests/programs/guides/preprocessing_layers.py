"""Preprocessing layers: normalization, look-ups, encodings, hashing and text, in the data pipeline and in the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

# Normalizing numerical features, in the model
x_train = np.random.normal(3.0, 2.0, size=(180, 12))
y_train = np.random.randint(4, size=(180, 1))
normalizer = layers.Normalization()
normalizer.adapt(x_train)

inputs = keras.Input(shape=(12,))
x = normalizer(inputs)
outputs = layers.Dense(4, activation="softmax")(x)
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
history = model.fit(x_train, y_train, epochs=2, batch_size=32)

# Augmentation of images, in the data pipeline
data_augmentation = keras.Sequential(
    [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1), layers.RandomZoom(0.1)]
)
images = np.random.randint(0, 256, size=(100, 8, 8, 3))
train_dataset = tf.data.Dataset.from_tensor_slices((images, y_train[:100]))
train_dataset = train_dataset.batch(16).map(lambda x, y: (data_augmentation(x), y))
model = keras.Sequential(
    [keras.Input((8, 8, 3)), layers.Rescaling(1.0 / 255), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(4)]
)
model.compile(optimizer="rmsprop", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train_dataset, epochs=2)

# Encoding string and integer categories via one-hot encoding
colors = tf.constant([["a"], ["b"], ["c"], ["b"], ["c"], ["a"]])
lookup = layers.StringLookup(output_mode="one_hot")
lookup.adapt(colors)
print(lookup(tf.constant([["a"], ["b"], ["c"], ["d"], ["e"], [""]])))

ids = tf.constant([[10], [20], [20], [10], [30], [0]])
integer_lookup = layers.IntegerLookup(output_mode="one_hot")
integer_lookup.adapt(ids)
print(integer_lookup(tf.constant([[10], [20], [50], [0]])))

# All kinds of features in one pipeline that ends in a model of numbers
table = {
    "color": np.random.choice(["a", "b", "c", "d"], size=(180, 1)),
    "id": np.random.choice([10, 20, 30, 40], size=(180, 1)),
}


def preprocess(features, label):
    encoded = [lookup(features["color"]), integer_lookup(features["id"])]
    return tf.concat([tf.cast(part, tf.float32) for part in encoded], axis=-1), label


dataset = tf.data.Dataset.from_tensor_slices((table, y_train)).batch(32)
dataset = dataset.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4, activation="softmax")])
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
print("categories:", model.fit(dataset, epochs=2).history["loss"])

# Text: multi-hot and TF-IDF of n-grams, applied before the model
words = "the brain is deeper than sea and wider sky for put them side by one other will include with ease".split()
texts = [" ".join(np.random.choice(words, size=np.random.randint(3, 12))) for _ in range(130)]
sentiments = np.array([text.count("the") for text in texts])
for mode in ("multi_hot", "tf_idf"):
    text_vectorizer = layers.TextVectorization(output_mode=mode, ngrams=2)
    text_vectorizer.adapt(texts)
    inputs = keras.Input(shape=(text_vectorizer.vocabulary_size(),))
    outputs = layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="rmsprop", loss="mse")
    train_dataset = tf.data.Dataset.from_tensor_slices((texts, sentiments))
    train_dataset = train_dataset.batch(24).map(lambda x, y, vectorize=text_vectorizer: (vectorize(x), y))
    print(mode, model.fit(train_dataset, epochs=2).history["loss"])

    # Use text_vectorizer inside an end-to-end model, for inference on strings.
    inputs = keras.Input(shape=(), dtype="string")
    end_to_end_model = keras.Model(inputs, model(text_vectorizer(inputs)))
    print("Model output:", end_to_end_model(tf.constant(["the one the other will include with ease"])))

# Text as integer sequences of different lengths, inside a model that trains on strings
text_vectorizer = layers.TextVectorization(output_mode="int", ragged=True)
text_vectorizer.adapt(texts)
print(text_vectorizer(texts[:2]))
vocabulary = text_vectorizer.get_vocabulary()[2:]
text_vectorizer = layers.TextVectorization(output_mode="int")
text_vectorizer.set_vocabulary(vocabulary)
inputs = keras.Input(shape=(1,), dtype="string")
x = layers.Embedding(text_vectorizer.vocabulary_size(), 8, mask_zero=True)(text_vectorizer(inputs))
outputs = layers.Dense(1)(layers.GRU(8)(x))
model = keras.Model(inputs, outputs)
model.compile(optimizer="rmsprop", loss="mse")
dataset = tf.data.Dataset.from_tensor_slices((np.array(texts)[:, None], sentiments)).batch(24)
print("int:", model.fit(dataset, epochs=2).history["loss"], model.evaluate(dataset, verbose=0))
