"""Membership and processes: the coordinator, the node agents, and how workers are started (no torch)."""
