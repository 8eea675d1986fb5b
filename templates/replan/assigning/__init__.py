"""Who takes which place: the cheapest assignment, and the flow through a network by which it is found."""
