"""The project's own planner, which takes what is fastest of all plans there are."""
