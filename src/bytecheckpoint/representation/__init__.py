"""The parts of a checkpoint: boxes, shards, catalog, storage files, names, values. No I/O and no processes."""
