"""Movie recommendations from ratings, with embeddings of the users and the movies."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(812)

user_ids = np.random.randint(1, 21, size=240) * 3
movie_ids = np.random.randint(1, 31, size=240) * 7
ratings = np.clip(np.round(3 + 0.05 * user_ids - 0.01 * movie_ids + np.random.normal(size=240)), 0.5, 5)

unique_user_ids = np.unique(user_ids).tolist()
user2user_encoded = {x: i for i, x in enumerate(unique_user_ids)}
unique_movie_ids = np.unique(movie_ids).tolist()
movie2movie_encoded = {x: i for i, x in enumerate(unique_movie_ids)}
user = np.array([user2user_encoded[x] for x in user_ids])
movie = np.array([movie2movie_encoded[x] for x in movie_ids])

num_users = len(user2user_encoded)
num_movies = len(movie2movie_encoded)
min_rating = min(ratings)
max_rating = max(ratings)

order = np.random.RandomState(42).permutation(len(ratings))
x = np.stack([user, movie], axis=1)[order]
y = ((ratings - min_rating) / (max_rating - min_rating))[order]
train_indices = int(0.9 * len(x))
x_train, x_val, y_train, y_val = (x[:train_indices], x[train_indices:], y[:train_indices], y[train_indices:])

EMBEDDING_SIZE = 8


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        self.num_users = num_users
        self.num_movies = num_movies
        self.embedding_size = embedding_size
        self.user_embedding = layers.Embedding(
            num_users,
            embedding_size,
            embeddings_initializer="he_normal",
            embeddings_regularizer=keras.regularizers.l2(1e-6),
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(
            num_movies,
            embedding_size,
            embeddings_initializer="he_normal",
            embeddings_regularizer=keras.regularizers.l2(1e-6),
        )
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        user_bias = self.user_bias(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        movie_bias = self.movie_bias(inputs[:, 1])
        dot_user_movie = ops.tensordot(user_vector, movie_vector, 2)
        x = dot_user_movie + user_bias + movie_bias
        return ops.nn.sigmoid(x)


model = RecommenderNet(num_users, num_movies, EMBEDDING_SIZE)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
model.fit(x=x_train, y=y_train, batch_size=64, epochs=3, verbose=1, validation_data=(x_val, y_val))

user_id = user_ids[5]
movies_watched = set(movie_ids[user_ids == user_id].tolist())
movies_not_watched = [[movie2movie_encoded[m]] for m in unique_movie_ids if m not in movies_watched]
user_encoder = user2user_encoded[int(user_id)]
user_movie_array = np.hstack(([[user_encoder]] * len(movies_not_watched), movies_not_watched))
model.predict(user_movie_array)
