"""A two-layer bidirectional LSTM on movie reviews given as word indices."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)

max_features = 50  # Only consider the most frequent words
maxlen = 16  # Only consider the first words of each review


def load_data(num_words, count):
    """Reviews of several lengths; words of the upper half are more frequent in positive ones."""
    sequences, labels = [], []
    for _ in range(count):
        label = np.random.randint(0, 2)
        length = np.random.randint(6, 24)
        low = num_words // 3 if label else 1
        sequences.append(list(np.random.randint(low, num_words - (0 if label else num_words // 3), size=length)))
        labels.append(label)
    return sequences, np.array(labels)


inputs = keras.Input(shape=(None,), dtype="int32")
x = layers.Embedding(max_features, 8)(inputs)
x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
x = layers.Bidirectional(layers.LSTM(8))(x)
outputs = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, outputs)
model.summary()

x_train, y_train = load_data(max_features, 150)
x_val, y_val = load_data(max_features, 60)
x_train = keras.utils.pad_sequences(x_train, maxlen=maxlen)
x_val = keras.utils.pad_sequences(x_val, maxlen=maxlen)

model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=32, epochs=2, validation_data=(x_val, y_val))

print("First predictions:", model.predict(x_val[:3]).ravel())
