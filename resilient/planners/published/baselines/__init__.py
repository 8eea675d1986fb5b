"""Plans without balance, in the manner of Megatron and FSDP: what the others are compared with."""
