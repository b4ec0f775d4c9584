"""Token cache: rows of any accepted source as memory-mapped ragged arrays. No torch, no prefect; see docs/token-cache.md."""
