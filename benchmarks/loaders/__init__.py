"""The contenders of the data loader benchmarks."""
