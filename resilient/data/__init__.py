"""Data sets, the order of samples, and how samples become microbatches."""
