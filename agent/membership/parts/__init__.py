"""What the membership machine knows, part by part: each alone writes its own, over the context that all share."""
