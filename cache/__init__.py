"""Token cache: rows of any accepted source as memory-mapped ragged arrays. No torch; see docs/token-cache.md."""
