"""What goes wrong in a history, when, and of what a seed has more than others."""
