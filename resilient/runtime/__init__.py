"""One worker's life across generations."""
