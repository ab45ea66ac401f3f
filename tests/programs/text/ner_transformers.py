"""Named entity recognition with a small Transformer and a loss that ignores the padding."""

import os
import random
import tempfile
from collections import Counter

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [
                layers.Dense(ff_dim, activation="relu"),
                layers.Dense(embed_dim),
            ]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs, training=False):
        attn_output = self.att(inputs, inputs)
        attn_output = self.dropout1(attn_output, training=training)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.ffn(out1)
        ffn_output = self.dropout2(ffn_output, training=training)
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, inputs):
        maxlen = ops.shape(inputs)[-1]
        positions = ops.arange(start=0, stop=maxlen, step=1)
        position_embeddings = self.pos_emb(positions)
        token_embeddings = self.token_emb(inputs)
        return token_embeddings + position_embeddings


class NERModel(keras.Model):
    def __init__(self, num_tags, vocab_size, maxlen=128, embed_dim=32, num_heads=2, ff_dim=32):
        super().__init__()
        self.embedding_layer = TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim)
        self.transformer_block = TransformerBlock(embed_dim, num_heads, ff_dim)
        self.dropout1 = layers.Dropout(0.1)
        self.ff = layers.Dense(ff_dim, activation="relu")
        self.dropout2 = layers.Dropout(0.1)
        self.ff_final = layers.Dense(num_tags, activation="softmax")

    def call(self, inputs, training=False):
        x = self.embedding_layer(inputs)
        x = self.transformer_block(x)
        x = self.dropout1(x, training=training)
        x = self.ff(x)
        x = self.dropout2(x, training=training)
        return self.ff_final(x)


# Sentences are exported to text files: number of tokens, the tokens and their tags, separated by tabs.
TAGS = ["[PAD]", "O", "PER", "LOC"]
WORDS = {
    1: ["goes", "to", "from", "sees", "and", "in", "the"],
    2: ["anna", "ben", "carla"],
    3: ["rome", "oslo", "lima"],
}


def export_to_file(export_file_path, count):
    with open(export_file_path, "w") as f:
        for _ in range(count):
            tags = random.choices([1, 2, 3], weights=[4, 1, 1], k=random.randint(5, 14))
            tokens = [random.choice(WORDS[tag]) for tag in tags]
            f.write("\t".join([str(len(tokens))] + tokens + [str(tag) for tag in tags]) + "\n")


data_dir = tempfile.mkdtemp()  # processes that run this at the same time must not write one file
export_to_file(os.path.join(data_dir, "conll_train.txt"), 150)
export_to_file(os.path.join(data_dir, "conll_val.txt"), 50)

with open(os.path.join(data_dir, "conll_train.txt")) as f:
    counter = Counter(token for line in f for token in line.split("\t")[1:] if token.strip().isalpha())
vocabulary = [token for token, count in counter.most_common(12)]
lookup_layer = keras.layers.StringLookup(vocabulary=vocabulary)


def map_record_to_training_data(record):
    record = tf.strings.split(record, sep="\t")
    length = tf.strings.to_number(record[0], out_type=tf.int32)
    tokens = record[1 : length + 1]
    tags = record[length + 1 :]
    tags = tf.strings.to_number(tags, out_type=tf.int64)
    return tokens, tags


def lowercase_and_convert_to_ids(tokens):
    tokens = tf.strings.lower(tokens)
    return lookup_layer(tokens)


batch_size = 32
train_data = tf.data.TextLineDataset(os.path.join(data_dir, "conll_train.txt"))
val_data = tf.data.TextLineDataset(os.path.join(data_dir, "conll_val.txt"))
print(list(train_data.take(1).as_numpy_iterator()))

train_dataset = (
    train_data.map(map_record_to_training_data)
    .map(lambda x, y: (lowercase_and_convert_to_ids(x), y))
    .padded_batch(batch_size)
)
val_dataset = (
    val_data.map(map_record_to_training_data)
    .map(lambda x, y: (lowercase_and_convert_to_ids(x), y))
    .padded_batch(batch_size)
)


class CustomNonPaddingTokenLoss(keras.losses.Loss):
    def __init__(self, name="custom_ner_loss"):
        super().__init__(name=name)

    def call(self, y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        loss = loss_fn(y_true, y_pred)
        mask = tf.cast(y_true > 0, dtype=loss.dtype)
        loss = loss * mask
        return tf.reduce_sum(loss) / tf.reduce_sum(mask)


ner_model = NERModel(len(TAGS), vocab_size=14, maxlen=16, embed_dim=8, num_heads=2, ff_dim=16)
ner_model.compile(optimizer="adam", loss=CustomNonPaddingTokenLoss())
history = ner_model.fit(train_dataset, epochs=3)


def calculate_metrics(dataset):
    all_true_tag_ids, all_predicted_tag_ids = [], []
    for x, y in dataset:
        output = ner_model.predict(x, verbose=0)
        predictions = np.reshape(np.argmax(output, axis=-1), [-1])
        labels = np.reshape(y, [-1])
        mask = (labels > 0) & (predictions > 0)
        all_true_tag_ids.append(labels[mask])
        all_predicted_tag_ids.append(predictions[mask])
    return np.mean(np.concatenate(all_true_tag_ids) == np.concatenate(all_predicted_tag_ids))


sample_input = lowercase_and_convert_to_ids("Anna goes from Rome to Oslo".split())
sample_input = tf.reshape(sample_input, shape=[1, -1])
prediction = np.argmax(ner_model.predict(sample_input), axis=-1)[0]
print([TAGS[i] for i in prediction])
print("Share of the tokens tagged right:", calculate_metrics(val_dataset))
print("Losses:", history.history["loss"])
