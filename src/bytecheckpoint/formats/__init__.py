"""Readers of checkpoints that other programs wrote: a foreign file or folder, as it lies, becomes an ordinary catalog.

Nothing foreign is executed or imported, and torch is not imported. A reader knows file formats, and no models.

All readers raise CheckpointNotFoundError if there is no such checkpoint, or files of it are missing;
CorruptCheckpointError if a file is damaged, or the files contradict each other; IncompatibleCheckpointError if they hold
what this package does not read, and the message says what.
"""
