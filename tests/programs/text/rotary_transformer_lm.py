"""A causal language model as in LLaMA: rotary embeddings, RMS normalization, SwiGLU, tied embeddings."""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


@dataclass
class Config:
    vocab_size: int = 20
    block_size: int = 16
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.1
    batch_size: int = 24
    max_epochs: int = 3
    learning_rate: float = 6e-3
    warmup_steps: int = 6
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 1337


cfg = Config()
keras.utils.set_random_seed(cfg.seed)


def rotate_half(x):
    x1, x2 = ops.split(x, 2, axis=-1)
    return ops.concatenate([-x2, x1], axis=-1)


class RotaryEmbedding(layers.Layer):
    def __init__(self, dim, max_length, base=10000.0, **kwargs):
        super().__init__(**kwargs)
        inv_freq = 1.0 / base ** (np.arange(0, dim, 2) / dim)
        angles = np.einsum("i,j->ij", np.arange(max_length), inv_freq)
        angles = np.concatenate([angles, angles], axis=-1)
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    def call(self, x):
        length = ops.shape(x)[-2]
        cos = ops.cast(self.cos, x.dtype)[:length]
        sin = ops.cast(self.sin, x.dtype)[:length]
        return x * cos + rotate_half(x) * sin


class CausalSelfAttention(layers.Layer):
    def __init__(self, cfg, **kwargs):
        super().__init__(**kwargs)
        self.n_head = cfg.n_head
        self.head_dim = cfg.n_embd // cfg.n_head
        self.qkv = layers.Dense(3 * cfg.n_embd, use_bias=False)
        self.proj = layers.Dense(cfg.n_embd, use_bias=False)
        self.rope = RotaryEmbedding(self.head_dim, cfg.block_size)
        self.dropout = layers.Dropout(cfg.dropout)

    def call(self, x, training=False):
        b, t, c = ops.shape(x)
        qkv = ops.reshape(self.qkv(x), (b, t, 3, self.n_head, self.head_dim))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), 3)
        q, k = self.rope(q), self.rope(k)
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / np.sqrt(self.head_dim)
        mask = ops.tril(ops.ones((t, t), dtype="bool"))
        scores = ops.where(mask, scores, ops.cast(-1e9, scores.dtype))
        weights = self.dropout(ops.softmax(scores, axis=-1), training=training)
        y = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))
        return self.proj(ops.reshape(y, (b, t, c)))


class Block(layers.Layer):
    def __init__(self, cfg, **kwargs):
        super().__init__(**kwargs)
        self.norm_1 = layers.RMSNormalization()
        self.attention = CausalSelfAttention(cfg)
        self.norm_2 = layers.RMSNormalization()
        self.gate = layers.Dense(2 * cfg.n_embd, use_bias=False, activation="silu")
        self.up = layers.Dense(2 * cfg.n_embd, use_bias=False)
        self.down = layers.Dense(cfg.n_embd, use_bias=False)

    def call(self, x, training=False):
        x = x + self.attention(self.norm_1(x), training=training)
        h = self.norm_2(x)
        return x + self.down(self.gate(h) * self.up(h))


class TinyLlama(keras.Model):
    def __init__(self, cfg, **kwargs):
        super().__init__(**kwargs)
        self.cfg = cfg
        self.wte = layers.ReversibleEmbedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = [Block(cfg, name=f"block_{i}") for i in range(cfg.n_layer)]
        self.norm = layers.RMSNormalization()

    def call(self, tokens, training=False):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, training=training)
        return self.wte(self.norm(x), reverse=True)

    def generate(self, tokens, new_tokens):
        for _ in range(new_tokens):
            logits = self.predict(tokens[:, -self.cfg.block_size :], verbose=0)[:, -1]
            tokens = np.concatenate([tokens, logits.argmax(axis=-1)[:, None]], axis=1)
        return tokens


class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base, warmup, total):
        self.base, self.warmup, self.total = base, warmup, total

    def __call__(self, step):
        step = tf.cast(step, keras.config.floatx())
        progress = tf.clip_by_value((step - self.warmup) / (self.total - self.warmup), 0.0, 1.0)
        cosine = 0.5 * (1.0 + tf.cos(np.pi * progress))
        return self.base * tf.where(step < self.warmup, (step + 1) / self.warmup, cosine)

    def get_config(self):
        return {"base": self.base, "warmup": self.warmup, "total": self.total}


class Perplexity(keras.metrics.Mean):
    def __init__(self, name="perplexity", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return super().update_state(losses, sample_weight)

    def result(self):
        return ops.exp(super().result())


def counting_sequences(n):
    """Counting forwards by a step that stays the same, modulo the vocabulary, now and then with a mistake."""
    start = np.random.randint(0, cfg.vocab_size, (n, 1))
    step = np.random.choice([1, 2, 5], (n, 1))
    tokens = (start + step * np.arange(cfg.block_size + 1)) % cfg.vocab_size
    noise = np.random.random(tokens.shape) < 0.03
    return np.where(noise, np.random.randint(0, cfg.vocab_size, tokens.shape), tokens).astype("int32")


train, val = counting_sequences(205), counting_sequences(40)
steps = int(np.ceil(len(train) / cfg.batch_size)) * cfg.max_epochs
model = TinyLlama(cfg)
optimizer = keras.optimizers.AdamW(
    WarmupCosine(cfg.learning_rate, cfg.warmup_steps, steps),
    beta_2=0.95,
    weight_decay=cfg.weight_decay,
    global_clipnorm=cfg.grad_clip,
)
optimizer.exclude_from_weight_decay(var_names=["scale", "norm"])
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[Perplexity(), keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
history = model.fit(
    train[:, :-1],
    train[:, 1:],
    batch_size=cfg.batch_size,
    epochs=cfg.max_epochs,
    validation_data=(val[:, :-1], val[:, 1:]),
    verbose=2,
)
model.summary()
print("loss", history.history["loss"], history.history["val_loss"])
print("perplexity", history.history["perplexity"], history.history["val_perplexity"])
print("evaluate", model.evaluate(val[:, :-1], val[:, 1:], batch_size=15, verbose=0, return_dict=True))
print(model.generate(np.array([[3, 4, 5, 6], [0, 5, 10, 15], [1, 3, 5, 7]]), 6))
