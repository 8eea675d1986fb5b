"""Pure: who takes part, and which generation follows which."""
