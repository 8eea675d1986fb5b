"""DistTrain: encoder and language model on devices of their own, microbatches in a better order."""
