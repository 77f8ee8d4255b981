"""The Megatron-Core adapter: parameters under their unsharded names, optimizers from their own tables of ranges."""
