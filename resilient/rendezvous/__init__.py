"""torchrun's rendezvous over etcd v3, for any job: ``torchrun --rdzv-backend etcd-v3``."""
