"""Ways to train on nodes that come and go, one file each."""
