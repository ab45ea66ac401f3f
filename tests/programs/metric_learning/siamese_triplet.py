"""Image similarity with a siamese network and a triplet loss."""

import keras
import numpy as np
import tensorflow as tf
from keras import Model, layers, metrics, ops, optimizers

keras.utils.set_random_seed(812)

target_shape = (12, 12)

# Pairs of similar images: the right one is the left one with noise.
rng = np.random.default_rng(0)
image_count = 150
left_images = rng.uniform(0, 255, size=(image_count,) + target_shape + (3,))
right_images = np.clip(left_images + rng.normal(scale=40, size=left_images.shape), 0, 255)
anchor_images = left_images.astype("uint8")
positive_images = right_images.astype("uint8")


def preprocess_image(image):
    """Convert an image to floating point."""
    return tf.image.convert_image_dtype(image, tf.float32)


def preprocess_triplets(anchor, positive, negative):
    return (preprocess_image(anchor), preprocess_image(positive), preprocess_image(negative))


anchor_dataset = tf.data.Dataset.from_tensor_slices(anchor_images)
positive_dataset = tf.data.Dataset.from_tensor_slices(positive_images)

# The negative images are all the others in random order.
negative_images = np.concatenate([anchor_images, positive_images])
np.random.RandomState(seed=32).shuffle(negative_images)
negative_dataset = tf.data.Dataset.from_tensor_slices(negative_images)
negative_dataset = negative_dataset.shuffle(buffer_size=4096)

dataset = tf.data.Dataset.zip((anchor_dataset, positive_dataset, negative_dataset))
dataset = dataset.shuffle(buffer_size=1024)
dataset = dataset.map(preprocess_triplets)

# Let's now split our dataset in train and validation.
train_dataset = dataset.take(round(image_count * 0.8))
val_dataset = dataset.skip(round(image_count * 0.8))

train_dataset = train_dataset.batch(32, drop_remainder=False)
train_dataset = train_dataset.prefetch(tf.data.AUTOTUNE)
val_dataset = val_dataset.batch(32, drop_remainder=False)
val_dataset = val_dataset.prefetch(tf.data.AUTOTUNE)

base_input = layers.Input(shape=target_shape + (3,))
x = layers.Conv2D(8, 3, activation="relu", name="conv1")(base_input)
x = layers.Conv2D(8, 3, strides=2, activation="relu", name="conv2_block1_out")(x)
x = layers.Conv2D(8, 3, activation="relu", name="conv3_block1_out")(x)
base_cnn = Model(base_input, x, name="base_cnn")

flatten = layers.Flatten()(base_cnn.output)
dense1 = layers.Dense(16, activation="relu")(flatten)
dense1 = layers.BatchNormalization()(dense1)
dense2 = layers.Dense(16, activation="relu")(dense1)
dense2 = layers.BatchNormalization()(dense2)
output = layers.Dense(8)(dense2)
embedding = Model(base_cnn.input, output, name="Embedding")

# Freeze the bottom of the network.
trainable = False
for layer in base_cnn.layers:
    if layer.name == "conv2_block1_out":
        trainable = True
    layer.trainable = trainable


class DistanceLayer(layers.Layer):
    """Computes the distance between the anchor and the positive embedding, and the anchor and the negative one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def call(self, anchor, positive, negative):
        ap_distance = ops.sum(tf.square(anchor - positive), -1)
        an_distance = ops.sum(tf.square(anchor - negative), -1)
        return (ap_distance, an_distance)


anchor_input = layers.Input(name="anchor", shape=target_shape + (3,))
positive_input = layers.Input(name="positive", shape=target_shape + (3,))
negative_input = layers.Input(name="negative", shape=target_shape + (3,))
distances = DistanceLayer()(embedding(anchor_input), embedding(positive_input), embedding(negative_input))
siamese_network = Model(inputs=[anchor_input, positive_input, negative_input], outputs=distances)


class SiameseModel(Model):
    """The Siamese Network model with a custom training and testing loops."""

    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        # GradientTape is a context manager that records every operation that you do inside.
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)

        # Storing the gradients of the loss function with respect to the weights/parameters.
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)

        # Applying the gradients on the model using the specified optimizer
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))

        # Let's update and return the training loss metric.
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self._compute_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        # The output of the network is a tuple containing the distances
        ap_distance, an_distance = self.siamese_network(data)

        # Subtracting both distances, and making sure we don't get a negative value.
        loss = ap_distance - an_distance
        loss = tf.maximum(loss + self.margin, 0.0)
        return loss

    @property
    def metrics(self):
        # We need to list our metrics here so the `reset_state()` can be called automatically.
        return [self.loss_tracker]


siamese_model = SiameseModel(siamese_network)
siamese_model.compile(optimizer=optimizers.Adam(0.0001))
history = siamese_model.fit(train_dataset, epochs=3, validation_data=val_dataset)
print("loss:", history.history["loss"], "val_loss:", history.history["val_loss"])

sample = next(iter(val_dataset))
anchor, positive, negative = sample
anchor_embedding, positive_embedding, negative_embedding = (
    embedding(anchor),
    embedding(positive),
    embedding(negative),
)

cosine_similarity = metrics.CosineSimilarity()
positive_similarity = cosine_similarity(anchor_embedding, positive_embedding)
print("Positive similarity:", positive_similarity.numpy())
cosine_similarity.reset_state()
negative_similarity = cosine_similarity(anchor_embedding, negative_embedding)
print("Negative similarity", negative_similarity.numpy())
