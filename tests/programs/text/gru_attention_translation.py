"""Dates written by people, translated to ISO form by a GRU encoder-decoder with attention."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(77)

UNITS = 16
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def make_dates(n):
    human, machine = [], []
    for _ in range(n):
        d, m, y = np.random.randint(1, 29), np.random.randint(1, 13), np.random.randint(0, 30)
        human.append([f"{d} {MONTHS[m - 1]} {y}", f"{MONTHS[m - 1]} {d}, {y}"][np.random.randint(2)])
        machine.append(f"<{y:02d}-{m:02d}-{d:02d}>")
    return human, machine


human, machine = make_dates(230)
chars = sorted(set("".join(human + machine)))
char_index = {c: i + 1 for i, c in enumerate(chars)}
vocab_size = len(chars) + 1


def encode(texts):
    return keras.utils.pad_sequences([[char_index[c] for c in text] for text in texts], padding="post")


source, target = encode(human), encode(machine)
BATCH_SIZE = 32


def prepare(source, target):
    return (source, target[:, :-1]), target[:, 1:]


dataset = tf.data.Dataset.from_tensor_slices((source[:190], target[:190])).shuffle(190, seed=5).batch(BATCH_SIZE)
train_ds = dataset.map(prepare, tf.data.AUTOTUNE)
val_ds = tf.data.Dataset.from_tensor_slices((source[190:], target[190:])).batch(BATCH_SIZE).map(prepare)


class Encoder(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.embedding = layers.Embedding(vocab_size, units, mask_zero=True)
        self.rnn = layers.Bidirectional(layers.GRU(units, return_sequences=True), merge_mode="sum")

    def call(self, x, training=False):
        mask = self.embedding.compute_mask(x)
        return self.rnn(self.embedding(x), mask=mask, training=training), mask


class BahdanauAttention(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.W1 = layers.Dense(units, use_bias=False)
        self.W2 = layers.Dense(units, use_bias=False)
        self.attention = layers.AdditiveAttention()

    def call(self, query, value, mask):
        return self.attention([self.W1(query), value, self.W2(value)], mask=[None, mask], return_attention_scores=True)


class Decoder(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.embedding = layers.Embedding(vocab_size, units)
        self.rnn = layers.GRU(units, return_sequences=True, return_state=True)
        self.attention = BahdanauAttention(units)
        self.combine = layers.Dense(units, activation="tanh")
        self.dropout = layers.Dropout(0.1)
        self.logits = layers.Dense(vocab_size)

    def call(self, tokens, context, mask=None, state=None, training=False):
        rnn_output, state = self.rnn(self.embedding(tokens), initial_state=state, training=training)
        attended, weights = self.attention(rnn_output, context, mask)
        combined = self.combine(tf.concat([attended, rnn_output], axis=-1))
        return self.logits(self.dropout(combined, training=training)), state, weights


class Translator(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.encoder = Encoder(units)
        self.decoder = Decoder(units)

    def call(self, inputs, training=None, mask=None):
        source, tokens = inputs
        context, context_mask = self.encoder(source, training=training)
        logits, _, _ = self.decoder(tokens, context, mask=context_mask, training=training)
        return logits


def masked_loss(y_true, y_pred):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_fn(y_true, y_pred)
    mask = tf.cast(y_true != 0, loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


def masked_acc(y_true, y_pred):
    y_pred = tf.cast(tf.argmax(y_pred, axis=-1), y_true.dtype)
    match = tf.cast(y_true == y_pred, keras.config.floatx())
    mask = tf.cast(y_true != 0, keras.config.floatx())
    return tf.reduce_sum(match * mask) / tf.reduce_sum(mask)


model = Translator(UNITS)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss=masked_loss, metrics=[masked_acc, masked_loss])
model.fit(
    train_ds,
    epochs=3,
    validation_data=val_ds,
    callbacks=[keras.callbacks.EarlyStopping(monitor="val_masked_loss", mode="min", patience=2)],
    verbose=2,
)

print("Evaluation:", model.evaluate(val_ds, return_dict=True, verbose=0))
print("Shape of predictions:", model.predict(val_ds, verbose=0).shape)
