"""Metrics of saves and loads: collected from all ranks, kept beside the run, delivered to other systems."""
