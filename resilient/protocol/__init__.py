"""What processes say to each other and how they start. Must not import torch."""
