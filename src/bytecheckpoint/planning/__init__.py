"""Pure functions over columns: deduplicate, balance, intersect, coalesce. No I/O, no processes."""
