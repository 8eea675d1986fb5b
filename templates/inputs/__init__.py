"""What is planned for: the model's profile, the machines, and published numbers of both."""
