"""OrchMLLM: every phase balanced for itself, over all instances."""
