"""Part-of-speech tags with a recurrent network: weights for each time step mask the padding."""

import keras
import numpy as np
from keras.layers import GRU, Bidirectional, Dense, Dropout, Embedding, TimeDistributed
from keras.models import Sequential
from keras.utils import pad_sequences, to_categorical

keras.utils.set_random_seed(1)

words = {
    "D": ["the", "a", "every", "some"],
    "A": ["small", "red", "old", "quick"],
    "N": ["dog", "cat", "house", "run", "child"],
    "V": ["sees", "likes", "run", "hates"],
}
tag_index = {tag: i + 1 for i, tag in enumerate(words)}  # 0 is for padding
word_index = {word: i + 1 for i, word in enumerate(sorted({w for ws in words.values() for w in ws}))}


def sentence(rng):
    def phrase():
        return ["D", *["A"] * rng.integers(0, 3), "N"]

    tags = phrase() + ["V"] + (phrase() if rng.random() < 0.6 else [])
    return [word_index[rng.choice(words[tag])] for tag in tags], [tag_index[tag] for tag in tags]


rng = np.random.default_rng(4)
sentences, tags = zip(*[sentence(rng) for _ in range(260)])
MAX_LENGTH = max(len(s) for s in sentences)
X = pad_sequences(sentences, maxlen=MAX_LENGTH, padding="post")
Y = to_categorical(pad_sequences(tags, maxlen=MAX_LENGTH, padding="post"), num_classes=len(tag_index) + 1)

# 0 for padding; verbs are rare and count three times; sentences of unreliable annotators count half.
W = (X > 0).astype("float32")
W[Y[..., tag_index["V"]] == 1] = 3.0
W[rng.random(len(W)) < 0.2] *= 0.5

X_train, X_test = X[:205], X[205:]
Y_train, Y_test = Y[:205], Y[205:]
W_train, W_test = W[:205], W[205:]

model = Sequential()
model.add(keras.Input((None,), dtype="int32"))
model.add(Embedding(len(word_index) + 1, 12))
model.add(Bidirectional(GRU(10, return_sequences=True)))
model.add(Dropout(0.2))
model.add(TimeDistributed(Dense(len(tag_index) + 1, activation="softmax")))
model.compile(
    loss="categorical_crossentropy",
    optimizer=keras.optimizers.Adam(0.01, clipvalue=0.5),
    metrics=["accuracy"],
    weighted_metrics=[keras.metrics.CategoricalAccuracy(name="weighted_acc"), "categorical_crossentropy"],
)
history = model.fit(
    X_train,
    Y_train,
    sample_weight=W_train,
    batch_size=48,
    epochs=3,
    validation_data=(X_test, Y_test, W_test),
    verbose=2,
)

# The same network again, which masks the padding by itself; one weight for each sentence.
masked = Sequential(
    [
        keras.Input((None,), dtype="int32"),
        Embedding(len(word_index) + 1, 12, mask_zero=True),
        Bidirectional(GRU(10, return_sequences=True)),
        Dense(len(tag_index) + 1, activation="softmax"),
    ]
)
masked.compile(
    loss="categorical_crossentropy",
    optimizer="adam",
    metrics=["accuracy"],
    weighted_metrics=[keras.metrics.CategoricalAccuracy(name="weighted_acc")],
)
per_sentence = np.where(rng.random((len(X_train), 1)) < 0.3, 0.0, 1.0)
masked_history = masked.fit(X_train, Y_train, sample_weight=per_sentence, batch_size=48, epochs=2, verbose=2)

scores = model.evaluate(X_test, Y_test, sample_weight=W_test, batch_size=20, verbose=0, return_dict=True)
model.predict(X_test, verbose=0)
print("evaluated:", scores, masked.evaluate(X_test, Y_test, batch_size=20, verbose=0))
