"""Masked language modeling with a small BERT, then fine-tuning for sentiment."""

import random
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)


@dataclass
class Config:
    MAX_LEN = 12
    BATCH_SIZE = 32
    LR = 0.001
    VOCAB_SIZE = 40
    EMBED_DIM = 16
    NUM_HEAD = 2
    FF_DIM = 16
    NUM_LAYERS = 1


config = Config()

subjects = ["I have watched this", "we saw that", "they loved the", "she hated the", "everybody knows this"]
opinions = {
    1: ["it was great", "so very moving", "truly wonderful"],
    0: ["it was awful", "so very dull", "truly boring"],
}
labels = np.random.randint(0, 2, size=180)
texts = [f"{random.choice(subjects)} movie and {random.choice(opinions[int(label)])} !" for label in labels]


def get_vectorize_layer(texts, vocab_size, max_seq, special_tokens=("[MASK]",)):
    vectorize_layer = layers.TextVectorization(
        max_tokens=vocab_size,
        output_mode="int",
        standardize="lower_and_strip_punctuation",
        output_sequence_length=max_seq,
    )
    vectorize_layer.adapt(texts)
    # Insert the mask token in the vocabulary
    vocab = vectorize_layer.get_vocabulary()
    vocab = vocab[2 : vocab_size - len(special_tokens)] + ["[mask]"]
    vectorize_layer.set_vocabulary(vocab)
    return vectorize_layer


vectorize_layer = get_vectorize_layer(texts, config.VOCAB_SIZE, config.MAX_LEN)
mask_token_id = vectorize_layer.get_vocabulary().index("[mask]")


def encode(texts):
    encoded_texts = vectorize_layer(texts)
    return encoded_texts.numpy()


def get_masked_input_and_labels(encoded_texts):
    # 15% masking, never of the special tokens
    inp_mask = np.random.rand(*encoded_texts.shape) < 0.15
    inp_mask[encoded_texts <= 2] = False
    # Set targets to -1 by default, it means ignore
    labels = -1 * np.ones(encoded_texts.shape, dtype=int)
    labels[inp_mask] = encoded_texts[inp_mask]
    # 90% of them become [MASK], 10% of which a random token
    encoded_texts_masked = np.copy(encoded_texts)
    inp_mask_2mask = inp_mask & (np.random.rand(*encoded_texts.shape) < 0.90)
    encoded_texts_masked[inp_mask_2mask] = mask_token_id
    inp_mask_2random = inp_mask_2mask & (np.random.rand(*encoded_texts.shape) < 1 / 9)
    encoded_texts_masked[inp_mask_2random] = np.random.randint(3, mask_token_id, inp_mask_2random.sum())
    # Sample weights for the loss
    sample_weights = np.ones(labels.shape)
    sample_weights[labels == -1] = 0
    y_labels = np.copy(encoded_texts)
    return encoded_texts_masked, y_labels, sample_weights


x_all = encode(texts)
x_masked_train, y_masked_labels, sample_weights = get_masked_input_and_labels(x_all)
mlm_ds = tf.data.Dataset.from_tensor_slices((x_masked_train, y_masked_labels, sample_weights))
mlm_ds = mlm_ds.shuffle(1000).batch(config.BATCH_SIZE)
train_classifier_ds = tf.data.Dataset.from_tensor_slices((x_all, labels)).shuffle(1000).batch(config.BATCH_SIZE)


def bert_module(query, key, value, i):
    attention_output = layers.MultiHeadAttention(
        num_heads=config.NUM_HEAD, key_dim=config.EMBED_DIM // config.NUM_HEAD, name=f"encoder_{i}_multiheadattention"
    )(query, key, value)
    attention_output = layers.Dropout(0.1, name=f"encoder_{i}_att_dropout")(attention_output)
    attention_output = layers.LayerNormalization(epsilon=1e-6, name=f"encoder_{i}_att_layernormalization")(
        query + attention_output
    )
    ffn = keras.Sequential(
        [layers.Dense(config.FF_DIM, activation="relu"), layers.Dense(config.EMBED_DIM)], name=f"encoder_{i}_ffn"
    )
    ffn_output = layers.Dropout(0.1, name=f"encoder_{i}_ffn_dropout")(ffn(attention_output))
    return layers.LayerNormalization(epsilon=1e-6, name=f"encoder_{i}_ffn_layernormalization")(
        attention_output + ffn_output
    )


loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
loss_tracker = keras.metrics.Mean(name="loss")


class MaskedLanguageModel(keras.Model):
    def train_step(self, inputs):
        if len(inputs) == 3:
            features, labels, sample_weight = inputs
        else:
            features, labels = inputs
            sample_weight = None

        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = loss_fn(labels, predictions, sample_weight=sample_weight)

        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))

        # Compute our own metrics
        loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": loss_tracker.result()}

    @property
    def metrics(self):
        # Listed here so that `reset_state()` is called at the start of each epoch
        return [loss_tracker]


def create_masked_language_bert_model():
    inputs = layers.Input((config.MAX_LEN,), dtype="int64")
    word_embeddings = layers.Embedding(config.VOCAB_SIZE, config.EMBED_DIM, name="word_embedding")(inputs)
    position_embeddings = layers.Embedding(config.MAX_LEN, config.EMBED_DIM, name="position_embedding")(
        ops.arange(start=0, stop=config.MAX_LEN, step=1)
    )
    encoder_output = word_embeddings + position_embeddings
    for i in range(config.NUM_LAYERS):
        encoder_output = bert_module(encoder_output, encoder_output, encoder_output, i)
    mlm_output = layers.Dense(config.VOCAB_SIZE, name="mlm_cls", activation="softmax")(encoder_output)
    mlm_model = MaskedLanguageModel(inputs, mlm_output, name="masked_bert_model")
    mlm_model.compile(optimizer=keras.optimizers.Adam(learning_rate=config.LR))
    return mlm_model


id2token = dict(enumerate(vectorize_layer.get_vocabulary()))
sample_tokens = np.copy(x_all[:1])
sample_tokens[0, 4] = mask_token_id


class MaskedTextGenerator(keras.callbacks.Callback):
    def __init__(self, sample_tokens, top_k=3):
        self.sample_tokens = sample_tokens
        self.k = top_k

    def on_epoch_end(self, epoch, logs=None):
        prediction = self.model.predict(self.sample_tokens, verbose=0)
        masked_index = np.where(self.sample_tokens == mask_token_id)[1]
        mask_prediction = prediction[0][masked_index][0]
        for p in mask_prediction.argsort()[-self.k :][::-1]:
            print({"predicted mask token": id2token.get(int(p)), "probability": float(mask_prediction[p])})


bert_masked_model = create_masked_language_bert_model()
bert_masked_model.summary()
history = bert_masked_model.fit(mlm_ds, epochs=3, callbacks=[MaskedTextGenerator(sample_tokens)])
bert_masked_model.save("bert_mlm_imdb.keras")

# Load the pretrained bert model and fine-tune it for classification
mlm_model = keras.models.load_model("bert_mlm_imdb.keras", custom_objects={"MaskedLanguageModel": MaskedLanguageModel})
pretrained_bert_model = keras.Model(mlm_model.input, mlm_model.get_layer("encoder_0_ffn_layernormalization").output)
pretrained_bert_model.trainable = False

inputs = layers.Input((config.MAX_LEN,), dtype="int64")
sequence_output = pretrained_bert_model(inputs)
pooled_output = layers.GlobalMaxPooling1D()(sequence_output)
hidden_layer = layers.Dense(16, activation="relu")(pooled_output)
outputs = layers.Dense(1, activation="sigmoid")(hidden_layer)
classifier_model = keras.Model(inputs, outputs, name="classification")
classifier_model.compile(optimizer=keras.optimizers.Adam(), loss="binary_crossentropy", metrics=["accuracy"])
classifier_history = classifier_model.fit(train_classifier_ds, epochs=1)

# Unfreeze the BERT model for fine-tuning
pretrained_bert_model.trainable = True
classifier_model.compile(optimizer=keras.optimizers.Adam(), loss="binary_crossentropy", metrics=["accuracy"])
classifier_history = classifier_model.fit(train_classifier_ds, epochs=1)
print(history.history["loss"], classifier_history.history)
