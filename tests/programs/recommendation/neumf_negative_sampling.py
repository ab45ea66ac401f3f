"""Neural collaborative filtering (NeuMF) on implicit feedback: a PyDataset draws new negatives for every epoch."""

import math

import keras
import numpy as np
from keras.layers import Concatenate, Dense, Embedding, Flatten, Input, Multiply
from keras.regularizers import l2

keras.utils.set_random_seed(2024)

NUM_USERS = 40
NUM_ITEMS = 60
NUM_NEGATIVES = 3
TOP_K = 10


def load_interactions():
    """Users like items whose number is near to theirs, on a circle."""
    train, test = [], []
    for user in range(NUM_USERS):
        centre = user * NUM_ITEMS // NUM_USERS
        items = np.unique((centre + np.round(np.random.normal(0, 4, size=7)).astype(int)) % NUM_ITEMS)
        np.random.shuffle(items)
        test.append((user, items[0]))  # leave one out
        train += [(user, item) for item in items[1:]]
    return np.array(train), np.array(test)


class NegativeSamplingSequence(keras.utils.PyDataset):
    def __init__(self, positives, num_items, num_negatives, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.positives = positives
        self.seen = set(map(tuple, positives))
        self.num_items = num_items
        self.num_negatives = num_negatives
        self.batch_size = batch_size
        self.sample()

    def sample(self):
        users, items, labels = [], [], []
        for user, item in self.positives:
            users.append(user)
            items.append(item)
            labels.append(1)
            for _ in range(self.num_negatives):
                j = np.random.randint(self.num_items)
                while (user, j) in self.seen:
                    j = np.random.randint(self.num_items)
                users.append(user)
                items.append(j)
                labels.append(0)
        order = np.random.permutation(len(labels))
        self.users = np.array(users)[order]
        self.items = np.array(items)[order]
        self.labels = np.array(labels, dtype="float32")[order]

    def __len__(self):
        return math.ceil(len(self.labels) / self.batch_size)

    def __getitem__(self, idx):
        low = idx * self.batch_size
        high = min(low + self.batch_size, len(self.labels))
        batch = {"user": self.users[low:high], "item": self.items[low:high]}
        return batch, self.labels[low:high]

    def on_epoch_end(self):
        self.sample()


def get_model(num_users, num_items, mf_dim=8, layer_sizes=(16, 8), reg=1e-6):
    user_input = Input(shape=(1,), dtype="int32", name="user")
    item_input = Input(shape=(1,), dtype="int32", name="item")

    mf_user = Embedding(num_users, mf_dim, embeddings_regularizer=l2(reg), name="mf_embedding_user")(user_input)
    mf_item = Embedding(num_items, mf_dim, embeddings_regularizer=l2(reg), name="mf_embedding_item")(item_input)
    mlp_user = Embedding(num_users, layer_sizes[0] // 2, embeddings_regularizer=l2(reg), name="mlp_user")(user_input)
    mlp_item = Embedding(num_items, layer_sizes[0] // 2, embeddings_regularizer=l2(reg), name="mlp_item")(item_input)

    mf_vector = Multiply()([Flatten()(mf_user), Flatten()(mf_item)])
    mlp_vector = Concatenate()([Flatten()(mlp_user), Flatten()(mlp_item)])
    for i, units in enumerate(layer_sizes):
        mlp_vector = Dense(units, kernel_regularizer=l2(reg), activation="relu", name=f"layer{i}")(mlp_vector)

    predict_vector = Concatenate()([mf_vector, mlp_vector])
    prediction = Dense(1, activation="sigmoid", kernel_initializer="lecun_uniform", name="prediction")(predict_vector)
    return keras.Model(inputs=[user_input, item_input], outputs=prediction)


train_pairs, test_pairs = load_interactions()
train_sequence = NegativeSamplingSequence(train_pairs, NUM_ITEMS, NUM_NEGATIVES, batch_size=64)
print(f"{len(train_pairs)} interactions, {len(train_sequence)} batches an epoch")

model = get_model(NUM_USERS, NUM_ITEMS)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
    loss="binary_crossentropy",
    metrics=[keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="acc")],
)
hist = model.fit(train_sequence, epochs=4, verbose=2)


def evaluate_ranking(model, test_pairs, num_candidates=30):
    hits, ndcgs = [], []
    rng = np.random.default_rng(0)
    users, items = [], []
    for user, item in test_pairs:
        candidates = [item, *rng.choice(NUM_ITEMS, num_candidates, replace=False)]
        users += [user] * len(candidates)
        items += candidates
    scores = model.predict({"user": np.array(users), "item": np.array(items)}, batch_size=100, verbose=0)
    for row in scores.reshape(len(test_pairs), num_candidates + 1):
        rank = int((row[1:] > row[0]).sum())
        hits.append(rank < TOP_K)
        ndcgs.append(math.log(2) / math.log(rank + 2) if rank < TOP_K else 0.0)
    return np.mean(hits), np.mean(ndcgs)


hr, ndcg = evaluate_ranking(model, test_pairs)
fresh = NegativeSamplingSequence(train_pairs, NUM_ITEMS, NUM_NEGATIVES, batch_size=50)
print("loss:", hist.history["loss"])
print("auc:", hist.history["auc"])
print("on fresh negatives:", model.evaluate(fresh, verbose=0, return_dict=True))
print(f"HR@{TOP_K} = {hr:.4f}, NDCG@{TOP_K} = {ndcg:.4f}")
