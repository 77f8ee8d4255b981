"""Checkpoints in more than one place: a hot tier that is flushed, copies in other machines' memory, cold storage."""
