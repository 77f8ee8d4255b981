"""Local disks, mounted network file systems, and the memory file system."""
