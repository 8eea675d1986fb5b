"""What all of planning uses and that knows nothing of it: words, compiled loops."""
