"""Samples to plan for: real data sets' records, and made-up ones with their lengths."""
