"""The tests; folders lie as those of the code."""
