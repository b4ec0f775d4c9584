"""Prefect only here: what runs, when, what is retried, what is cached."""

import logging

# Prefect gives our loggers its handlers (prefect.toml, extra_loggers), but no level: without one, INFO reaches nobody.
for _name in ("flows", "dflash", "cache"):
    logging.getLogger(_name).setLevel(logging.INFO)
