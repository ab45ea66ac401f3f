"""A miniature GPT that writes a sentence after every epoch."""

import random

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.layers import TextVectorization

keras.utils.set_random_seed(812)


def causal_attention_mask(batch_size, n_dest, n_src, dtype):
    """Mask the upper half of the dot product matrix: no information flows from later tokens to earlier ones."""
    i = ops.arange(n_dest)[:, None]
    j = ops.arange(n_src)
    m = i >= j - n_src + n_dest
    mask = ops.cast(m, dtype)
    mask = ops.reshape(mask, [1, n_dest, n_src])
    return ops.tile(mask, [batch_size, 1, 1])


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        input_shape = ops.shape(inputs)
        batch_size = input_shape[0]
        seq_len = input_shape[1]
        causal_mask = causal_attention_mask(batch_size, seq_len, seq_len, "bool")
        attention_output = self.att(inputs, inputs, attention_mask=causal_mask)
        attention_output = self.dropout1(attention_output)
        out1 = self.layernorm1(inputs + attention_output)
        ffn_output = self.dropout2(self.ffn(out1))
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = ops.shape(x)[-1]
        positions = self.pos_emb(ops.arange(0, maxlen, 1))
        return self.token_emb(x) + positions


vocab_size = 40
maxlen = 12
embed_dim = 16
num_heads = 2
feed_forward_dim = 16


def create_model():
    inputs = layers.Input(shape=(maxlen,), dtype="int32")
    x = TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim)(inputs)
    x = TransformerBlock(embed_dim, num_heads, feed_forward_dim)(x)
    outputs = layers.Dense(vocab_size)(x)
    model = keras.Model(inputs=inputs, outputs=[outputs, x])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    # No loss and optimization based on the embeddings from the transformer block
    model.compile("adam", loss=[loss_fn, None])
    return model


batch_size = 32
subjects = ["the movie", "this film", "the story", "that actor", "the ending"]
verbs = ["was", "is", "seemed", "looked"]
opinions = ["very good", "quite bad", "long and dull", "funny", "really moving", "too short"]
texts = [
    f"{random.choice(subjects)} {random.choice(verbs)} {random.choice(opinions)} "
    f"and {random.choice(subjects)} {random.choice(verbs)} {random.choice(opinions)} ."
    for _ in range(150)
]
text_ds = tf.data.Dataset.from_tensor_slices(texts)
text_ds = text_ds.shuffle(buffer_size=256)
text_ds = text_ds.batch(batch_size)

vectorize_layer = TextVectorization(
    standardize="lower", max_tokens=vocab_size - 1, output_mode="int", output_sequence_length=maxlen + 1
)
vectorize_layer.adapt(text_ds)
vocab = vectorize_layer.get_vocabulary()  # To get words back from token indices


def prepare_lm_inputs_labels(text):
    """Shift word sequences by one position so that the target for position i is the word at position i+1."""
    text = tf.expand_dims(text, -1)
    tokenized_sentences = vectorize_layer(text)
    x = tokenized_sentences[:, :-1]
    y = tokenized_sentences[:, 1:]
    return x, y


text_ds = text_ds.map(prepare_lm_inputs_labels, num_parallel_calls=tf.data.AUTOTUNE)
text_ds = text_ds.prefetch(tf.data.AUTOTUNE)


class TextGenerator(keras.callbacks.Callback):
    """Feeds a prompt to the model and samples the following words one at a time."""

    def __init__(self, max_tokens, start_tokens, top_k=10):
        self.max_tokens = max_tokens
        self.start_tokens = start_tokens
        self.k = top_k

    def sample_from(self, logits):
        logits, indices = ops.top_k(logits, k=self.k, sorted=True)
        indices = np.asarray(indices).astype("int32")
        preds = keras.activations.softmax(ops.expand_dims(logits, 0))[0]
        preds = np.asarray(preds).astype("float32")
        return np.random.choice(indices, p=preds)

    def on_epoch_end(self, epoch, logs=None):
        start_tokens = list(self.start_tokens)
        num_tokens_generated = 0
        while num_tokens_generated <= self.max_tokens:
            pad_len = maxlen - len(start_tokens)
            sample_index = len(start_tokens) - 1
            if pad_len < 0:
                x = start_tokens[:maxlen]
                sample_index = maxlen - 1
            elif pad_len > 0:
                x = start_tokens + [0] * pad_len
            else:
                x = start_tokens
            x = np.array([x])
            y, _ = self.model.predict(x, verbose=0)
            sample_token = self.sample_from(y[0][sample_index])
            start_tokens.append(sample_token)
            num_tokens_generated += 1


word_to_index = {word: index for index, word in enumerate(vocab)}
start_prompt = "this movie is"
start_tokens = [word_to_index.get(word, 1) for word in start_prompt.split()]
text_gen_callback = TextGenerator(6, start_tokens)

model = create_model()
model.fit(text_ds, verbose=2, epochs=3, callbacks=[text_gen_callback])
