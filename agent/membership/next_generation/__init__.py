"""Pure functions from the survivors' reports to the next generation: agreement, plan, copies, speeds of nodes."""
