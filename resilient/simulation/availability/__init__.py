"""Which nodes there are, and when they come and go: read from files or made up."""
