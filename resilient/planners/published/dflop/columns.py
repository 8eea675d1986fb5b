"""A table of a unit's options, one column each: what its rows are."""

TP, DP, PP, WHOLE, CALL, STATE, KEPT, LARGEST, LONGEST, SUMS, TAIL = range(11)
"""Rows of a table of options."""
