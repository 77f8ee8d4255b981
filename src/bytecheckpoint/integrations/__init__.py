"""Checkpointing for programs that train with other people's tools: one module for each tool, imported when it is used."""
