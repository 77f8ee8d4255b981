"""Sockets between ranks: messages through rank 0 (a star), bulk bytes over direct connections (a mesh)."""
