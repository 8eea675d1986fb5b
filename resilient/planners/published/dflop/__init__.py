"""DFLOP: parallelism and microbatches chosen for the distribution of the data."""
