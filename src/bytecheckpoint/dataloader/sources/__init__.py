"""Sources of documents: text, JSON Lines, Parquet, token files, sequences and iterables."""
