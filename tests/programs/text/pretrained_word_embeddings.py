"""Newsgroup classification on top of frozen, pretrained word embeddings."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.layers import Embedding, TextVectorization

keras.utils.set_random_seed(812)

# Messages of three groups, each with some words of its own.
class_names = ["space", "hockey", "cooking"]
topic_words = [
    ["rocket", "moon", "orbit", "launch", "star"],
    ["goal", "team", "ice", "season", "coach"],
    ["oven", "salt", "flour", "taste", "dish"],
]
common_words = ["the", "a", "is", "this", "with", "and", "for", "good", "we", "think"]
samples = []
labels = []
for class_index, words in enumerate(topic_words):
    for _ in range(60):
        length = np.random.randint(8, 20)
        samples.append(" ".join(np.random.choice(words + common_words, size=length)))
        labels.append(class_index)
print("Classes:", class_names)
print("Number of samples:", len(samples))

# Shuffle the data
seed = 1337
rng = np.random.RandomState(seed)
rng.shuffle(samples)
rng = np.random.RandomState(seed)
rng.shuffle(labels)

# Extract a training & validation split
validation_split = 0.2
num_validation_samples = int(validation_split * len(samples))
train_samples = samples[:-num_validation_samples]
val_samples = samples[-num_validation_samples:]
train_labels = labels[:-num_validation_samples]
val_labels = labels[-num_validation_samples:]

vectorizer = TextVectorization(max_tokens=100, output_sequence_length=20)
text_ds = tf.data.Dataset.from_tensor_slices(train_samples).batch(128)
vectorizer.adapt(text_ds)
print(vectorizer.get_vocabulary()[:5])

voc = vectorizer.get_vocabulary()
word_index = dict(zip(voc, range(len(voc))))

# Stand-in for the GloVe file
known_words = [word for words in topic_words for word in words[:4]] + common_words[:8]
embeddings_index = {word: np.random.normal(scale=0.5, size=8).astype("float32") for word in known_words}
print(f"Found {len(embeddings_index)} word vectors.")

num_tokens = len(voc) + 2
embedding_dim = 8
hits = 0
misses = 0
embedding_matrix = np.zeros((num_tokens, embedding_dim))
for word, i in word_index.items():
    embedding_vector = embeddings_index.get(word)
    if embedding_vector is not None:
        # Words not found in embedding index will be all-zeros.
        embedding_matrix[i] = embedding_vector
        hits += 1
    else:
        misses += 1
print(f"Converted {hits} words ({misses} misses)")

embedding_layer = Embedding(num_tokens, embedding_dim, trainable=False)
embedding_layer.build((1,))
embedding_layer.set_weights([embedding_matrix])

int_sequences_input = keras.Input(shape=(None,), dtype="int32")
embedded_sequences = embedding_layer(int_sequences_input)
x = layers.Conv1D(16, 3, activation="relu")(embedded_sequences)
x = layers.MaxPooling1D(2)(x)
x = layers.Conv1D(16, 3, activation="relu")(x)
x = layers.GlobalMaxPooling1D()(x)
x = layers.Dense(16, activation="relu")(x)
x = layers.Dropout(0.5)(x)
preds = layers.Dense(len(class_names), activation="softmax")(x)
model = keras.Model(int_sequences_input, preds)
model.summary()

x_train = vectorizer(np.array([[s] for s in train_samples])).numpy()
x_val = vectorizer(np.array([[s] for s in val_samples])).numpy()
y_train = np.array(train_labels)
y_val = np.array(val_labels)

model.compile(loss="sparse_categorical_crossentropy", optimizer="rmsprop", metrics=["acc"])
history = model.fit(x_train, y_train, batch_size=32, epochs=3, validation_data=(x_val, y_val))

string_input = keras.Input(shape=(1,), dtype="string")
x = vectorizer(string_input)
preds = model(x)
end_to_end_model = keras.Model(string_input, preds)
probabilities = end_to_end_model(keras.ops.convert_to_tensor([["this rocket is for the moon"]]))
print(class_names[np.argmax(probabilities[0])], np.asarray(probabilities))
