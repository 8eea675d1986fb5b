"""Pure planning: everything here is a function of its arguments (no torch, no I/O, no clock)."""
