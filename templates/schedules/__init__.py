"""What the workers of a pipeline do in a step: actions, their orders, and how long these take."""
