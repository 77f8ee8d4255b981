"""Measurements of one rank during one save or load: phases, spans, counters."""
