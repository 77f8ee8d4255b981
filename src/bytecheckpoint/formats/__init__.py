"""Readers of checkpoints that other programs wrote: a foreign file or folder, as it lies, becomes an ordinary catalog.

Nothing foreign is executed or imported, and torch is not imported. A reader knows file formats, and no models.
"""
