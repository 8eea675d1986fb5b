"""What devices divide of a state, whole for as long as a layer runs on it."""
