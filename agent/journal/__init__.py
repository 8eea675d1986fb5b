"""What a run's coordinator was told and has caused, on disk: to be decided again, and to be gone on with by another."""
