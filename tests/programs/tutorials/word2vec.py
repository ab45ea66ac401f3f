"""Word embeddings learned by skip-grams with negative sampling."""

import io

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

tf.keras.utils.set_random_seed(812)

SEED = 42
AUTOTUNE = tf.data.AUTOTUNE


# Generates skip-gram pairs with negative sampling for a list of sequences
# (int-encoded sentences) based on window size, number of negative samples and vocabulary size.
def generate_training_data(sequences, window_size, num_ns, vocab_size, seed):
    targets, contexts, labels = [], [], []
    rng = np.random.default_rng(seed)
    for sequence in sequences:
        for position, target_word in enumerate(sequence):
            neighbours = range(max(0, position - window_size), min(len(sequence), position + window_size + 1))
            for other in neighbours:
                if other == position or target_word == 0 or sequence[other] == 0:
                    continue
                candidates = [word for word in range(2, vocab_size) if word != sequence[other]]
                negative_sampling_candidates = rng.choice(candidates, size=num_ns, replace=False)

                # Build context and label vectors (for one target word)
                context = np.concatenate([[sequence[other]], negative_sampling_candidates])
                label = np.array([1] + [0] * num_ns, dtype="int64")
                targets.append(target_word)
                contexts.append(context)
                labels.append(label)
    return targets, contexts, labels


sentences = [
    "The wide road shimmered in the hot sun",
    "first citizen before we proceed any further hear me speak",
    "speak speak",
    "you are all resolved rather to die than to famish",
]
text_ds = tf.data.Dataset.from_tensor_slices(sentences).filter(lambda x: tf.cast(tf.strings.length(x), bool))

# Define the vocabulary size and the number of words in a sequence.
vocab_size = 24
sequence_length = 10

vectorize_layer = layers.TextVectorization(
    standardize="lower_and_strip_punctuation",
    max_tokens=vocab_size,
    output_mode="int",
    output_sequence_length=sequence_length,
)
vectorize_layer.adapt(text_ds.batch(1024))
inverse_vocab = vectorize_layer.get_vocabulary()
print(inverse_vocab)

# Vectorize the data in text_ds.
text_vector_ds = text_ds.batch(1024).prefetch(AUTOTUNE).map(vectorize_layer).unbatch()
sequences = list(text_vector_ds.as_numpy_iterator())

num_ns = 4
targets, contexts, labels = generate_training_data(
    sequences=sequences, window_size=3, num_ns=num_ns, vocab_size=len(inverse_vocab), seed=SEED
)
targets = np.array(targets)
contexts = np.array(contexts)
labels = np.array(labels)
print(f"targets.shape: {targets.shape}, contexts.shape: {contexts.shape}, labels.shape: {labels.shape}")

BATCH_SIZE = 32
BUFFER_SIZE = 10000
dataset = tf.data.Dataset.from_tensor_slices(((targets, contexts), labels))
dataset = dataset.shuffle(BUFFER_SIZE).batch(BATCH_SIZE, drop_remainder=True)
dataset = dataset.cache().prefetch(buffer_size=AUTOTUNE)


class Word2Vec(tf.keras.Model):
    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = layers.Embedding(vocab_size, embedding_dim, name="w2v_embedding")
        self.context_embedding = layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        # target: (batch, dummy?)  # The dummy axis doesn't exist in TF2.7+
        # context: (batch, context)
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        # target: (batch,)
        word_emb = self.target_embedding(target)
        # word_emb: (batch, embed)
        context_emb = self.context_embedding(context)
        # context_emb: (batch, context, embed)
        dots = tf.einsum("be,bce->bc", word_emb, context_emb)
        # dots: (batch, context)
        return dots


def custom_loss(y_true, x_logit):
    return tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=y_true)


embedding_dim = 8
word2vec = Word2Vec(vocab_size, embedding_dim)
word2vec.compile(optimizer="adam", loss=tf.keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
tensorboard_callback = tf.keras.callbacks.TensorBoard(log_dir="logs")
history = word2vec.fit(dataset, epochs=3, callbacks=[tensorboard_callback])
print(history.history)

# The same with a loss of one's own: one number for each context word
other = Word2Vec(vocab_size, embedding_dim)
other.compile(optimizer="adam", loss=custom_loss)
print(other.fit(dataset, epochs=2).history)

# Embedding lookup and analysis
weights = word2vec.get_layer("w2v_embedding").get_weights()[0]
vocab = vectorize_layer.get_vocabulary()

with io.open("vectors.tsv", "w", encoding="utf-8") as out_v, io.open("metadata.tsv", "w", encoding="utf-8") as out_m:  # noqa: UP020
    for index, word in enumerate(vocab):
        if index == 0:
            continue  # skip 0, it's padding.
        vec = weights[index]
        out_v.write("\t".join([str(x) for x in vec]) + "\n")
        out_m.write(word + "\n")
print(weights.shape, weights[2])
