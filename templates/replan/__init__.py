"""From one plan to the next: which nodes take which places, and which states are copied."""
