"""What stages of a configuration take of time and memory, on all devices or on those that are left."""
