"""Analyse metrics: summaries of operations and runs, and findings."""
