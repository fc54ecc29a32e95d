"""The ops on arrays: attention over pages, and what goes with it."""
