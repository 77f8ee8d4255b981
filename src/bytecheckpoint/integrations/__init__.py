"""Save and restore programs that train with other tools. There is one package for each tool, imported when it is used.

A tool that has a class for checkpoints gets a class of the same name, which takes its place: `ModelCheckpoint` for
Lightning, `CheckpointManager` for torchtitan and Ray. For other tools `attach` changes one object of the tool.
All of them take `keep=`, `save_options=` and `load_options=` as `bytecheckpoint.manager.CheckpointManager` does.
"""
