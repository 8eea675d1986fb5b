"""What a policy gets done between the changes of a trace, and what it amounts to. Pure."""
