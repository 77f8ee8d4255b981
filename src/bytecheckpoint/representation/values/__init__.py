"""Plain values as bytes and back, with their exact types and without pickle (docs/format-values.md)."""
