"""FSDP1, torch.distributed.fsdp.FullyShardedDataParallel: flat parameters as the original ones they are made of."""
