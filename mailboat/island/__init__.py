"""The island's side: a durable store, the loop that follows a channel, and the engines that hold the weights."""
