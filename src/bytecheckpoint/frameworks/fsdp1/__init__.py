"""FSDP1, torch.distributed.fsdp.FullyShardedDataParallel: flat parameters as the original parameters in them."""
