"""The boundary of every command: whatever is raised becomes one line, and the traceback goes to a log that it names."""

import errno
import os
import traceback
from pathlib import Path

from pydantic import ValidationError

LONGEST = 800  # letters of a line

# What the disk says and a second try would say again.
HOPELESS_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

_REPAIRS = {
    errno.ENOSPC: "Free some space (`python -m cache list` shows what the caches take), or set home to a larger disk.",
    errno.EDQUOT: "Free some of your quota (`python -m cache list` shows what the caches take), or set home elsewhere.",
    errno.EROFS: "It is mounted read-only: set home or $DFLASH_HOME to a place that can be written.",
    errno.EACCES: "Give this user the right to it, or set home or $DFLASH_HOME to a place of its own.",
    errno.ENOTDIR: "A file is where a directory is expected: correct the path, or home.",
    errno.EISDIR: "A directory is where a file is expected: correct the path.",
    errno.ENOENT: "Correct the path, or make it again.",
}
_LIBRARIES = {
    "pyarrow": "Arrow cannot read or make this data. Write the file again, or name another in rows.source.",
    "huggingface_hub": "Check the name, `hf auth login` and the network; or download the model and name its directory.",
    "httpx": "Nothing answers there: check the address and the network, or start the server.",
    "httpcore": "Nothing answers there: check the address and the network, or start the server.",
    "prefect": "Check PREFECT_API_URL; unset, a temporary server is started.",
    "yaml": "Correct the YAML at that place.",
    "safetensors": "Download or write the file again.",
}


def one_line(error: BaseException) -> str:
    """What happened, where, and what to do."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        what = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}; got {one['input']!r}"[:200] for one in found)
        return _short(what)
    kind = type(error)
    library = kind.__module__.partition(".")[0]
    if library in _LIBRARIES:
        return _short(f"{kind.__name__}: {error}", _LIBRARIES[library])
    if isinstance(error, OSError):
        where = " → ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        what = os.strerror(error.errno) if error.errno else str(error)
        repair = _REPAIRS.get(error.errno or 0, "Check the disk and the path.")
        return _short(f"{where or kind.__name__}: {what}", repair)
    return _short(f"{kind.__name__}: {error}", "This is a fault of dflash-train: please report it with that log.")


def report(error: BaseException, home: Path) -> str:
    """The line, and where the traceback is, which this writes."""
    log = home / "logs" / "errors.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as stream:
            stream.write("".join(traceback.format_exception(error)) + "\n")
    except OSError:
        return f"{one_line(error)} (Its traceback could not be written to {log}.)"
    return f"{one_line(error)} The traceback is in {log}."


def _short(what: str, repair: str = "") -> str:
    text = " ".join(what.split())
    text = text if len(text) <= LONGEST else text[:LONGEST] + " …"
    return text if not repair else f"{text.rstrip('.')}. {repair}"
