"""What the steps of a generation are for one worker: of a chain, or of units whose samples a planner places."""
