"""The metrics of a run as one page for a browser, and as a trace for Perfetto."""
