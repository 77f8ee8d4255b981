"""Show the metrics of a run: as a report, as one page for a browser, as a trace for Perfetto."""
