"""From layers to templates: the stage layouts with the shortest step, exactly."""
