"""What can go wrong with a token cache. A message says what, got, expected, and what to do."""


class CacheError(Exception):
    """Base of all errors of this package."""


class CacheMismatch(CacheError):
    """The cache is whole but is not the one that was asked for: other key, layout version, dtype or tokenizer."""


class CacheIncomplete(CacheError):
    """The cache was never finished, or a file of it is missing or too short."""


class CacheCorrupt(CacheError):
    """A file of the cache does not hold what the manifest says."""


class BadRow(CacheError):
    """The source holds a row that no rule allows to drop: names file, row and value."""


class BadSource(CacheError):
    """The source cannot be read as rows: not there, unknown format or columns, several splits, too few good rows."""


class CacheInUse(CacheError):
    """Somebody builds it or reads it now, so it is not taken away."""


class CannotLock(CacheError):
    """The file system has no locks, without which two processes could write one place."""
