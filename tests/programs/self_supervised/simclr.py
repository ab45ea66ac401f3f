"""Semi-supervised image classification with contrastive pretraining by SimCLR."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)

unlabeled_dataset_size = 160
labeled_dataset_size = 80
image_size = 12
image_channels = 3
num_classes = 5

num_epochs = 2
batch_size = 36  # Corresponds to 7 steps per epoch
width = 8
temperature = 0.1

rng = np.random.default_rng(0)
prototypes = rng.uniform(0, 200, size=(num_classes, image_size, image_size, image_channels))


def make_arrays(size):
    labels = rng.integers(0, num_classes, size=size)
    noise = rng.uniform(0, 55, size=(size, image_size, image_size, image_channels))
    return (prototypes[labels] + noise).astype("float32"), labels


def prepare_dataset():
    # Labeled and unlabeled samples are loaded synchronously with batch sizes selected accordingly
    steps_per_epoch = (unlabeled_dataset_size + labeled_dataset_size) // batch_size + 1
    unlabeled_batch_size = unlabeled_dataset_size // steps_per_epoch + 1
    labeled_batch_size = labeled_dataset_size // steps_per_epoch + 1
    unlabeled = tf.data.Dataset.from_tensor_slices(make_arrays(unlabeled_dataset_size))
    unlabeled = unlabeled.shuffle(buffer_size=10 * unlabeled_batch_size).batch(unlabeled_batch_size)
    labeled = tf.data.Dataset.from_tensor_slices(make_arrays(labeled_dataset_size))
    labeled = labeled.shuffle(buffer_size=10 * labeled_batch_size).batch(labeled_batch_size)
    test_dataset = tf.data.Dataset.from_tensor_slices(make_arrays(50)).batch(batch_size)
    test_dataset = test_dataset.prefetch(buffer_size=tf.data.AUTOTUNE)
    train_dataset = tf.data.Dataset.zip((unlabeled, labeled)).prefetch(buffer_size=tf.data.AUTOTUNE)
    return train_dataset, labeled, test_dataset


train_dataset, labeled_train_dataset, test_dataset = prepare_dataset()


class RandomColorAffine(layers.Layer):
    def __init__(self, brightness=0, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.brightness = brightness

    def call(self, images, training=True):
        if training:
            batch_size = ops.shape(images)[0]
            scales = 1 + keras.random.uniform(
                (batch_size, 1, 1, 1), minval=-self.brightness, maxval=self.brightness, seed=self.seed_generator
            )
            images = ops.clip(images * scales, 0, 1)
        return images


def get_augmenter(min_area, brightness):
    zoom_factor = 1.0 - min_area**0.5
    return keras.Sequential(
        [
            layers.Rescaling(1 / 255),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(zoom_factor / 2, zoom_factor / 2),
            layers.RandomZoom((-zoom_factor, 0.0), (-zoom_factor, 0.0)),
            RandomColorAffine(brightness),
        ]
    )


def get_encoder():
    return keras.Sequential(
        [
            layers.Conv2D(width, kernel_size=3, strides=2, activation="relu"),
            layers.Conv2D(width, kernel_size=3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
        ],
        name="encoder",
    )


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = temperature
        self.contrastive_augmenter = get_augmenter(min_area=0.25, brightness=0.6)
        self.classification_augmenter = get_augmenter(min_area=0.75, brightness=0.3)
        self.encoder = get_encoder()
        self.projection_head = keras.Sequential(
            [keras.Input(shape=(width,)), layers.Dense(width, activation="relu"), layers.Dense(width)],
            name="projection_head",
        )
        self.linear_probe = keras.Sequential(
            [layers.Input(shape=(width,)), layers.Dense(num_classes)], name="linear_probe"
        )
        self.encoder.summary()
        self.projection_head.summary()
        self.linear_probe.summary()

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.contrastive_accuracy, self.probe_loss_tracker, self.probe_accuracy]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1, order=2)
        projections_2 = ops.normalize(projections_2, axis=1, order=2)
        similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / self.temperature
        batch_size = ops.shape(projections_1)[0]
        contrastive_labels = ops.arange(batch_size)
        self.contrastive_accuracy.update_state(contrastive_labels, similarities)
        self.contrastive_accuracy.update_state(contrastive_labels, ops.transpose(similarities))
        # The temperature-scaled similarities are used as logits for cross-entropy
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(contrastive_labels, similarities, from_logits=True)
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, ops.transpose(similarities), from_logits=True
        )
        return ops.mean((loss_1_2 + loss_2_1) / 2)

    def train_step(self, data):
        (unlabeled_images, _), (labeled_images, labels) = data
        images = ops.concatenate((unlabeled_images, labeled_images), axis=0)
        augmented_images_1 = self.contrastive_augmenter(images, training=True)
        augmented_images_2 = self.contrastive_augmenter(images, training=True)
        with tf.GradientTape() as tape:
            features_1 = self.encoder(augmented_images_1, training=True)
            features_2 = self.encoder(augmented_images_2, training=True)
            projections_1 = self.projection_head(features_1, training=True)
            projections_2 = self.projection_head(features_2, training=True)
            contrastive_loss = self.contrastive_loss(projections_1, projections_2)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights))
        self.contrastive_loss_tracker.update_state(contrastive_loss)
        preprocessed_images = self.classification_augmenter(labeled_images, training=True)
        with tf.GradientTape() as tape:
            # the encoder is used in inference mode here to avoid regularization
            features = self.encoder(preprocessed_images, training=False)
            class_logits = self.linear_probe(features, training=True)
            probe_loss = self.probe_loss(labels, class_logits)
        gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.linear_probe.trainable_weights))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, class_logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        labeled_images, labels = data
        preprocessed_images = self.classification_augmenter(labeled_images, training=False)
        features = self.encoder(preprocessed_images, training=False)
        class_logits = self.linear_probe(features, training=False)
        probe_loss = self.probe_loss(labels, class_logits)
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, class_logits)
        return {m.name: m.result() for m in self.metrics[2:]}


pretraining_model = ContrastiveModel()
pretraining_model.compile(contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam())
pretraining_history = pretraining_model.fit(train_dataset, epochs=num_epochs, validation_data=test_dataset)

finetuning_model = keras.Sequential(
    [get_augmenter(min_area=0.75, brightness=0.3), pretraining_model.encoder, layers.Dense(num_classes)],
    name="finetuning_model",
)
finetuning_model.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
finetuning_history = finetuning_model.fit(labeled_train_dataset, epochs=num_epochs, validation_data=test_dataset)
