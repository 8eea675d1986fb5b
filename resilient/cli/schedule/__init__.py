"""``resilient schedule``: what a pipeline's workers do when, without running it."""
