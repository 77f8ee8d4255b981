"""Measurements of saves and loads, and pauses of the garbage collector."""
