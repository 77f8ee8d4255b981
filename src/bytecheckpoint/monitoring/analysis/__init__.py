"""What the metrics of operations say."""
