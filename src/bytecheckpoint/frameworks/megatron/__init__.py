"""Megatron-Core: models by the names that they have without parallelism, optimizers from the buffers they keep."""
