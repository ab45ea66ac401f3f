"""Deep Q-learning on a tiny game played on a grid of pixels."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

# Configuration parameters for the whole setup
seed = 42
gamma = 0.9  # Discount factor for past rewards
epsilon = 1.0  # Epsilon greedy parameter
epsilon_min = 0.1  # Minimum epsilon greedy parameter
epsilon_max = 1.0  # Maximum epsilon greedy parameter
epsilon_interval = epsilon_max - epsilon_min  # Rate at which to reduce chance of random action being taken
batch_size = 16  # Size of batch taken from replay buffer
max_steps_per_episode = 20
max_episodes = 30


class CatchEnv:
    """A ball falls from the top of an 8x8 screen; the paddle on the bottom row should catch it."""

    size = 8

    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)

    def screen(self):
        image = np.zeros((self.size, self.size, 1), dtype="float32")
        image[self.ball_row, self.ball_column, 0] = 1.0
        image[self.size - 1, max(self.paddle - 1, 0) : self.paddle + 2, 0] += 0.5
        return image

    def reset(self):
        self.ball_row, self.ball_column = 0, self.rng.randint(self.size)
        self.paddle = self.rng.randint(self.size)
        return self.screen(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, self.size - 1))
        self.ball_row += 1
        done = self.ball_row == self.size - 1
        reward = (1.0 if abs(self.ball_column - self.paddle) <= 1 else -1.0) if done else 0.0
        return self.screen(), reward, done, False, {}


env = CatchEnv(seed)
num_actions = 3


def create_q_model():
    return keras.Sequential(
        [
            layers.Input(shape=(8, 8, 1)),
            layers.Conv2D(8, 4, strides=2, activation="relu"),
            layers.Conv2D(8, 3, strides=1, activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(num_actions, activation="linear"),
        ]
    )


# The first model makes the predictions for Q-values which are used to make an action.
model = create_q_model()
# The target model predicts future rewards. Its weights are updated only every now and then.
model_target = create_q_model()
model_target.set_weights(model.get_weights())

optimizer = keras.optimizers.Adam(learning_rate=0.001, clipnorm=1.0)

# Experience replay buffers
action_history = []
state_history = []
state_next_history = []
rewards_history = []
done_history = []
episode_reward_history = []
running_reward = 0
episode_count = 0
frame_count = 0
epsilon_random_frames = 40  # Number of frames to take random action and observe output
epsilon_greedy_frames = 250.0  # Number of frames for exploration
max_memory_length = 150  # Maximum replay length
update_after_actions = 4  # Train the model after 4 actions
update_target_network = 60  # How often to update the target network
loss_function = keras.losses.Huber()

while True:
    observation, _ = env.reset()
    state = np.array(observation)
    episode_reward = 0

    for timestep in range(1, max_steps_per_episode):
        frame_count += 1

        # Use epsilon-greedy for exploration
        if frame_count < epsilon_random_frames or epsilon > np.random.rand(1)[0]:
            # Take random action
            action = np.random.choice(num_actions)
        else:
            # Predict action Q-values from environment state and take the best action
            state_tensor = keras.ops.convert_to_tensor(state)
            state_tensor = keras.ops.expand_dims(state_tensor, 0)
            action_probs = model(state_tensor, training=False)
            action = keras.ops.argmax(action_probs[0]).numpy()

        # Decay probability of taking random action
        epsilon -= epsilon_interval / epsilon_greedy_frames
        epsilon = max(epsilon, epsilon_min)

        # Apply the sampled action in our environment
        state_next, reward, done, _, _ = env.step(action)
        state_next = np.array(state_next)
        episode_reward += reward

        # Save actions and states in replay buffer
        action_history.append(action)
        state_history.append(state)
        state_next_history.append(state_next)
        done_history.append(done)
        rewards_history.append(reward)
        state = state_next

        # Update every fourth frame and once batch size is over 32
        if frame_count % update_after_actions == 0 and len(done_history) > batch_size:
            # Get indices of samples for replay buffers
            indices = np.random.choice(range(len(done_history)), size=batch_size)

            # Using list comprehension to sample from replay buffer
            state_sample = np.array([state_history[i] for i in indices])
            state_next_sample = np.array([state_next_history[i] for i in indices])
            rewards_sample = [rewards_history[i] for i in indices]
            action_sample = [action_history[i] for i in indices]
            done_sample = np.array([float(done_history[i]) for i in indices])

            # Build the updated Q-values for the sampled future states; the final frame gives no future reward
            future_rewards = model_target.predict(state_next_sample, verbose=0)
            updated_q_values = rewards_sample + gamma * keras.ops.amax(future_rewards, axis=1) * (1 - done_sample)

            # Create a mask so we only calculate loss on the updated Q-values
            masks = keras.ops.one_hot(action_sample, num_actions)

            with tf.GradientTape() as tape:
                # Train the model on the states and updated Q-values
                q_values = model(state_sample)
                # Apply the masks to the Q-values to get the Q-value for action taken
                q_action = keras.ops.sum(keras.ops.multiply(q_values, masks), axis=1)
                # Calculate loss between new Q-value and old Q-value
                loss = loss_function(updated_q_values, q_action)

            # Backpropagation
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))

        if frame_count % update_target_network == 0:
            # update the the target network with new weights
            model_target.set_weights(model.get_weights())
            print(f"running reward: {running_reward:.2f} at episode {episode_count}, frame count {frame_count}")

        # Limit the state and reward history
        if len(rewards_history) > max_memory_length:
            del rewards_history[:1]
            del state_history[:1]
            del state_next_history[:1]
            del action_history[:1]
            del done_history[:1]

        if done:
            break

    # Update running reward to check condition for solving
    episode_reward_history.append(episode_reward)
    if len(episode_reward_history) > 20:
        del episode_reward_history[:1]
    running_reward = np.mean(episode_reward_history)

    episode_count += 1
    if running_reward > 0.9:  # Condition to consider the task solved
        print(f"Solved at episode {episode_count}!")
        break
    if max_episodes > 0 and episode_count >= max_episodes:  # Maximum number of episodes reached
        print(f"Stopped at episode {episode_count}!")
        break

print("Last loss:", float(loss), "running reward:", running_reward)
