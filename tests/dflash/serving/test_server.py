"""A real server, llama.cpp's, with a drafter of ours: same texts, and pass for pass what our decoder accepts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoding_toys import STOP, Toy, prompts, save_tokenizer, taught

from dflash.config import TargetConfig
from dflash.decoding.decode import DecodeLimits, plain, seeded, speculate
from dflash.decoding.sampling import Sampling
from dflash.errors import ConfigMismatch
from dflash.export.gguf_layout import write_gguf_layout
from dflash.serving.client import Client
from dflash.serving.server import ServerFailed, ServerSettings, running, serve, settings_of

TOKENS = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, ServerSettings]:
    """A taught toy as GGUF files, in float32."""
    directory = tmp_path_factory.mktemp("served")
    one = taught()
    one.target.model.save_pretrained(directory / "target")
    save_tokenizer(directory / "target")
    config = TargetConfig(model=str(directory / "target"), dtype="float32")
    write_gguf_layout(directory, one.drafter, one.target.model, config, "float32")
    return one, ServerSettings(directory / "target.gguf", directory / "drafter.gguf", 3, context=128, parallel=2)


def test_texts_and_passes_are_those_of_our_decoder(made: tuple[Toy, ServerSettings], tmp_path: Path) -> None:
    one, settings = made
    asked = prompts(6, 6, 9, seed=5)
    limits, greedy = DecodeLimits(TOKENS, frozenset({STOP})), Sampling()
    dice = seeded(0, len(asked), torch.device("cpu"))
    alone = [plain(one.target, prompt, limits, greedy, die) for prompt, die in zip(asked, dice, strict=True)]
    ours = speculate(one.target, one.drafter, one.ends, asked, limits, greedy, dice)
    ids = [prompt.tolist() for prompt in asked]
    with running(replace(settings, drafter=None), tmp_path / "log") as server:
        client = Client(server.url)
        spelled = [client.spell(prompt, TOKENS) for prompt in ids]
        texts = [client.stream(prompt, TOKENS).text for prompt in ids]
        full = client.stream((ids[0] * 50)[:122], TOKENS, is_endless=True)
        client.close()
    assert [answer.ids for answer in spelled] == [answer.ids for answer in alone]
    with running(settings, tmp_path / "log") as server:
        client = Client(server.url)
        helped = [client.stream(prompt, TOKENS) for prompt in ids]
        together = client.at_once(ids[:2], TOKENS)
        at_the_end = client.stream((ids[0] * 50)[:122], TOKENS, is_endless=True)
        client.close()
    assert [answer.text for answer in helped] == texts
    assert together == texts[:2]
    assert (at_the_end.text, at_the_end.finish) == (full.text, "length") == (full.text, full.finish)
    assert [answer.walk.emitted for answer in helped] == [sum(answer.emitted) for answer in ours]
    assert [answer.walk.accepted for answer in helped] == [answer.accepted for answer in ours]
    assert max(max(answer.accepted) for answer in ours) == 3, "whole blocks are accepted, too"


def test_a_file_that_is_no_drafter_is_an_error_of_one_line(made: tuple[Toy, ServerSettings], tmp_path: Path) -> None:
    _, settings = made
    broken = tmp_path / "drafter.gguf"
    broken.write_bytes(b"GGUF of another kind")
    with (
        pytest.raises(ServerFailed, match=r"the server ended with exit code 1\. The end of .*log"),
        running(replace(settings, drafter=broken), tmp_path / "log"),
    ):
        pass
    with pytest.raises(ConfigMismatch, match=r"there is no file .*missing.gguf"):
        serve(replace(settings, target=tmp_path / "missing.gguf"), print, lambda: None)
    with pytest.raises(ConfigMismatch, match=r"export\.layouts has no gguf"):
        settings_of({"layouts": {"dflash": {}}})
