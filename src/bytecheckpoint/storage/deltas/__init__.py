"""Storage files that are kept as differences from an earlier file (docs/format.md, section 3.7; decision 0096)."""
