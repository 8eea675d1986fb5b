"""Layer states in memory, between peers and on disk."""
