"""Names of folders that are hard on URLs, shells and file systems."""

__all__ = ["ODD_NAMES"]

ODD_NAMES = ("a b", "100%", "%2e%2e", "ünï-文", "x#y", "x&y=z+w", "it's", "(1)[2]{3}", "~")
