"""Planning of saves and loads: pure functions over columns, without I/O and processes."""
