"""States that are streamed in pieces: the protocol, its place in saves and loads, and two providers."""
