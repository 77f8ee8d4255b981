"""What one rank measures during one save or load: phases, spans, counters."""
