"""Save and load FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel): flat parameters by their original ones."""
