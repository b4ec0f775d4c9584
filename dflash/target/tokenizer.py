"""The target's tokenizer: where its files are, and whether it is the one that made the rows."""

from pathlib import Path

from cache.disk.manifest import Manifest
from cache.key.behaviour import spelling
from dflash.config import TargetConfig
from dflash.errors import TargetMismatch

# What a tokenizer needs of a hub model, and its sizes; not the weights.
_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_CODE = ["*.py"]  # where the target's own code may run


def tokenizer_directory(target: TargetConfig) -> Path:
    """Where the tokenizer's files and the sizes are; those of a hub model are fetched, its weights are not."""
    directory = Path(target.model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # imported here: a target on disk needs no hub

    patterns = _FILES + (_CODE if target.trust_remote_code else [])
    try:
        return Path(snapshot_download(target.model, revision=target.revision, allow_patterns=patterns))
    except Exception as error:  # a name that is none, a model that is not there or not ours to see, no network
        what = " ".join(str(error).split())[:200]
        raise TargetMismatch(
            f"target.model={target.model}: no directory here, and no hub model of that name and revision can be "
            f"fetched ({type(error).__name__}: {what}). Correct target.model, or download it and name its directory."
        ) from error


def commit_of(target: TargetConfig) -> str | None:
    """The commit that the revision of a hub model means now; None for a target on disk."""
    directory = tokenizer_directory(target)
    return directory.name if directory.parent.name == "snapshots" else None


def check_tokenizer(manifest: Manifest, target: TargetConfig) -> None:
    """Raise TargetMismatch when the rows were made with another tokenizer than the target's.

    Two tokenizers of one size pass every other check: the drafter would learn, and draft, other words. Rows that came
    tokenised without a tokenizer say nothing of theirs.
    """
    facts = manifest.tokenizer
    if not facts.get("probe"):
        return
    directory = tokenizer_directory(target)
    repair = "Prepare the rows again with this target."
    expected = facts["probe"]
    # The same code as made the rows: transformers, where they were made of conversations.
    is_chat = bool(facts.get("chat"))
    got, texts = spelling(directory, by_transformers=is_chat, trust_remote_code=target.trust_remote_code)
    if got != expected:
        pairs = zip(got, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
        raise TargetMismatch(
            f"the rows' tokenizer is not the target's: for a probe text it gave {expected[at : at + 4]} at token {at}, "
            f"where {target.model} gives {got[at : at + 4]}. {repair}"
        )
    if texts != facts.get("vocabulary", texts):
        raise TargetMismatch(
            f"the rows' tokenizer is not the target's: the texts of all its ids hash to {facts['vocabulary']}, those "
            f"of {target.model} to {texts}, so some id stands for other words. {repair}"
        )
