"""What a checkpoint is: boxes, shards, the catalog, storage files, names, values. No I/O, no processes."""
