"""Measuring: phases, counters, reports."""
