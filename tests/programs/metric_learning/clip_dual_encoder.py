"""CLIP in miniature: an image encoder and a text encoder trained together with an in-batch softmax."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(42)

VOCAB_SIZE = 30
MAX_LEN = 6
EMBED_DIM = 16
BATCH_SIZE = 32


def make_pairs(n):
    """Small pictures with a coloured patch, and captions which say the colour, the row and the column."""
    rng = np.random.default_rng(n)
    colour = rng.integers(0, 3, n)
    row = rng.integers(0, 4, n)
    col = rng.integers(0, 4, n)
    images = rng.normal(0, 0.1, size=(n, 12, 12, 3))
    for i in range(n):
        images[i, 3 * row[i] : 3 * row[i] + 3, 3 * col[i] : 3 * col[i] + 3, colour[i]] += 1.0
    captions = np.zeros((n, MAX_LEN), dtype="int32")
    captions[:, 0] = 1
    captions[:, 1] = 2 + colour
    captions[:, 2] = 10 + row
    captions[:, 3] = 20 + col
    longer = rng.random(n) < 0.5
    captions[longer, 4] = 28
    return images.astype("float32"), captions


def project_embeddings(embeddings, num_projection_layers, projection_dims, dropout_rate):
    projected = layers.Dense(projection_dims)(embeddings)
    for _ in range(num_projection_layers):
        x = layers.Activation("gelu")(projected)
        x = layers.Dense(projection_dims)(x)
        x = layers.Dropout(dropout_rate)(x)
        projected = layers.LayerNormalization()(layers.Add()([projected, x]))
    return projected


def create_vision_encoder():
    inputs = layers.Input((12, 12, 3), name="image_input")
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, project_embeddings(x, 1, EMBED_DIM, 0.1), name="vision_encoder")


def create_text_encoder():
    inputs = layers.Input((MAX_LEN,), dtype="int32", name="text_input")
    x = layers.Embedding(VOCAB_SIZE, 16, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.GRU(12))(x)
    return keras.Model(inputs, project_embeddings(x, 1, EMBED_DIM, 0.1), name="text_encoder")


class CLIP(keras.Model):
    def __init__(self, image_encoder, text_encoder, temperature=0.2, **kwargs):
        super().__init__(**kwargs)
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder
        self.logit_scale = self.add_weight(
            name="logit_scale", shape=(), initializer=keras.initializers.Constant(np.log(1 / temperature))
        )

    def call(self, inputs, training=False):
        image = ops.normalize(self.image_encoder(inputs["image"], training=training), axis=-1)
        text = ops.normalize(self.text_encoder(inputs["caption"], training=training), axis=-1)
        # Both embeddings side by side, so that the loss can compare every image with every caption.
        return ops.concatenate([image * ops.exp(self.logit_scale), text], axis=-1)


def clip_logits(y_pred):
    image, text = ops.split(y_pred, 2, axis=-1)
    return ops.matmul(image, ops.transpose(text))


def clip_loss(y_true, y_pred):
    logits = clip_logits(y_pred)
    labels = ops.arange(ops.shape(logits)[0])
    images_loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    captions_loss = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(logits), from_logits=True)
    return (images_loss + captions_loss) / 2


def in_batch_accuracy(y_true, y_pred):
    logits = clip_logits(y_pred)
    labels = ops.arange(ops.shape(logits)[0])
    return keras.metrics.sparse_categorical_accuracy(labels, logits)


train_images, train_captions = make_pairs(210)
val_images, val_captions = make_pairs(50)

model = CLIP(create_vision_encoder(), create_text_encoder())
model.compile(optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-3), loss=clip_loss, metrics=[in_batch_accuracy])

history = model.fit(
    {"image": train_images, "caption": train_captions},
    np.zeros(len(train_images)),  # the pairs are the labels
    batch_size=BATCH_SIZE,
    epochs=3,
    validation_data=({"image": val_images, "caption": val_captions}, np.zeros(len(val_images))),
    verbose=2,
)

# Find images for captions.
image_embeddings = keras.utils.normalize(model.image_encoder.predict(val_images, verbose=0))
text_embeddings = keras.utils.normalize(model.text_encoder.predict(val_captions, verbose=0))
similarity = text_embeddings @ image_embeddings.T
top = np.argsort(-similarity, axis=1)[:, :5]
recall = np.mean([i in top[i] for i in range(len(top))])

print("Loss:", history.history["loss"])
print("Validation:", history.history["val_loss"], history.history["val_in_batch_accuracy"])
print("Scale of the logits:", float(ops.exp(model.logit_scale)))
print(f"Recall at 5: {recall:.3f}")
