"""Who leads a job: how nodes find out, what they do while nobody does, and how one of them comes to lead it."""
