"""What tensor-parallel devices compute together: each has a part of the matrices, and between them some tokens."""
