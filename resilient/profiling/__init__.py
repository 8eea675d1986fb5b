"""Measures what layers cost on a device, and remembers it."""
