"""Encode plain values as bytes and decode them, with their exact types and without pickle (docs/format-values.md)."""
