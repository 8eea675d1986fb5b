"""Spreads samples over microbatches and replicas, and orders them: the algorithms that planners share."""
