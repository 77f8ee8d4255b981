"""The flush: committed steps move from the hot tier to the durable storage."""
