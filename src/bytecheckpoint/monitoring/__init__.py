"""Collect metrics of saves and loads from all ranks, keep them beside the run, and send them to other systems."""
