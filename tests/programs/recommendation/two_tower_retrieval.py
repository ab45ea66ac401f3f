"""Two-tower retrieval of movies, trained with an in-batch softmax."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

user_count, movie_count = 25, 40
user_index = np.random.randint(0, user_count, size=230)
movie_index = (user_index % 4) * 10 + np.random.randint(0, 10, size=230)
ratings = tf.data.Dataset.from_tensor_slices(
    {"movie_title": [f"movie {i}" for i in movie_index], "user_id": [str(i) for i in user_index]}
)
movies = tf.data.Dataset.from_tensor_slices([f"movie {i}" for i in range(movie_count)])

shuffled = ratings.shuffle(1_000, seed=42, reshuffle_each_iteration=False)
train = shuffled.take(180)
test = shuffled.skip(180).take(50)

unique_movie_titles = np.unique(np.concatenate(list(movies.batch(100))))
unique_user_ids = np.unique(np.concatenate(list(ratings.batch(1_000).map(lambda x: x["user_id"]))))

embedding_dimension = 8
user_model = keras.Sequential(
    [
        layers.StringLookup(vocabulary=unique_user_ids, mask_token=None),
        layers.Embedding(len(unique_user_ids) + 1, embedding_dimension),
    ]
)
movie_model = keras.Sequential(
    [
        layers.StringLookup(vocabulary=unique_movie_titles, mask_token=None),
        layers.Embedding(len(unique_movie_titles) + 1, embedding_dimension),
    ]
)


class Retrieval(layers.Layer):
    """The task: tell the movie each user watched from those of the other users of the batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")
        self.accuracy = keras.metrics.CategoricalAccuracy(name="top_1_in_batch")

    def call(self, query_embeddings, candidate_embeddings):
        scores = tf.linalg.matmul(query_embeddings, candidate_embeddings, transpose_b=True)
        num_queries = tf.shape(scores)[0]
        num_candidates = tf.shape(scores)[1]
        labels = tf.eye(num_queries, num_candidates)
        loss = self.loss_fn(y_true=labels, y_pred=scores)
        self.accuracy.update_state(labels, scores)
        return loss


class MovielensModel(keras.Model):
    def __init__(self, user_model, movie_model):
        super().__init__()
        self.movie_model = movie_model
        self.user_model = user_model
        self.task = Retrieval()

    def compute_loss(self, features, training=False):
        user_embeddings = self.user_model(features["user_id"], training=training)
        positive_movie_embeddings = self.movie_model(features["movie_title"], training=training)
        return self.task(user_embeddings, positive_movie_embeddings)

    def train_step(self, features):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(features, training=True)
            regularization_loss = sum(self.losses)
            total_loss = loss + regularization_loss
        gradients = tape.gradient(total_loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        metrics = {metric.name: metric.result() for metric in self.metrics}
        metrics["loss"] = loss
        metrics["regularization_loss"] = regularization_loss
        metrics["total_loss"] = total_loss
        return metrics

    def test_step(self, features):
        loss = self.compute_loss(features, training=False)
        regularization_loss = sum(self.losses)
        metrics = {metric.name: metric.result() for metric in self.metrics}
        metrics["loss"] = loss
        metrics["regularization_loss"] = regularization_loss
        metrics["total_loss"] = loss + regularization_loss
        return metrics


model = MovielensModel(user_model, movie_model)
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))

cached_train = train.shuffle(1_000).batch(64).cache()
cached_test = test.batch(32).cache()

model.fit(cached_train, epochs=3)
print("Test:", model.evaluate(cached_test, return_dict=True))
