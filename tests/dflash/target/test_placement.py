"""Which devices run what: from names, from measured times, dealt among processes; and a target over several of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import transformers as hf
from accelerate import dispatch_model

from dflash.config import TargetConfig
from dflash.distributed import Ranks
from dflash.errors import ConfigMismatch
from dflash.target import placement, sharding
from dflash.target.frozen import Target, _moved, decoder_layers
from dflash.target.placement import best_processes, place, replicas, split
from dflash.target.sharding import balanced, device_map

CPU = torch.device("cpu")
CONFIGS = {
    "llama": hf.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, head_dim=8
    ),
    "gemma2, tied, windows": hf.Gemma2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
    ),
}
IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`gpus(4)`: this machine has four, as far as anybody can tell."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def cuda(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", index) for index in indices)


@pytest.mark.parametrize(
    ("devices", "target_s", "drafter_s", "together", "seconds"),
    [
        (1, 0.48, 0.15, True, 0.63),  # both share it
        (2, 0.48, 0.15, True, 0.315),  # apart, one target would starve the drafter: 0.48
        (4, 0.48, 0.15, False, 0.16),  # together 0.1575: not worth it
        (8, 0.48, 0.15, False, 0.15),
        (2, 0.10, 0.15, False, 0.15),  # the drafter sets the pace
    ],
)
def test_measured_times_decide(devices: int, target_s: float, drafter_s: float, together: bool, seconds: float) -> None:
    found = split(devices, target_s, drafter_s)
    assert found.together is together
    assert found.seconds == pytest.approx(seconds)


def test_measured_times_say_how_many_processes() -> None:
    assert best_processes(8, target_s=0.48, drafter_s=0.15) == 2  # of three targets and a drafter each: 80 ms
    assert best_processes(4, target_s=0.48, drafter_s=0.15) == 1
    assert best_processes(8, target_s=0.01, drafter_s=0.15) == 8
    assert best_processes(1, target_s=0.48, drafter_s=0.15) == 1


def test_auto_leaves_the_last_gpu_to_the_drafter_until_times_are_known(gpus: Callable[[int], None]) -> None:
    gpus(2)
    devices = place(TargetConfig(model="-"))
    assert (devices.drafter, devices.targets) == (cuda(1)[0], (cuda(0),))
    assert devices.undecided
    assert devices.decided(0.48, 0.15).targets == (cuda(0), cuda(1))
    assert devices.decided(0.10, 0.15).targets == (cuda(0),)


@pytest.mark.parametrize(("count", "names"), [(0, "cpu"), (1, "cuda:0")])
def test_one_device_is_shared_and_nothing_is_measured(gpus: Callable[[int], None], count: int, names: str) -> None:
    gpus(count)
    devices = place(TargetConfig(model="-"))
    assert devices.to_json() == {"drafter": names, "targets": [names]}
    assert not devices.undecided
    assert not devices.apart


def test_processes_of_a_machine_cut_its_gpus(gpus: Callable[[int], None]) -> None:
    gpus(8)
    parts = [place(TargetConfig(model="-"), Ranks(r, 2, r, 2)) for r in range(2)]
    assert [part.drafter.index for part in parts] == [3, 7]
    assert [[replica[0].index for replica in part.targets] for part in parts] == [[0, 1, 2], [4, 5, 6]]
    gpus(1)
    with pytest.raises(ConfigMismatch, match="2 processes on this machine see 1 GPUs"):
        place(TargetConfig(model="-"), Ranks(0, 2, 0, 2))


def test_named_replicas_are_dealt_and_the_drafter_takes_a_free_device(gpus: Callable[[int], None]) -> None:
    gpus(6)
    config = TargetConfig(model="-", devices=["cuda:0+cuda:1", "cuda:2+cuda:3"])
    assert place(config).targets == (cuda(0, 1), cuda(2, 3))
    assert place(config).drafter == cuda(4)[0]
    assert place(config).to_json()["targets"] == config.devices
    parts = [place(config, Ranks(r, 2, r, 2)) for r in range(2)]
    assert [(part.targets, part.drafter.index) for part in parts] == [((cuda(0, 1),), 4), ((cuda(2, 3),), 5)]
    gpus(4)
    assert [place(config, Ranks(r, 2, r, 2)).drafter.index for r in range(2)] == [1, 3], "beside its own target"
    with pytest.raises(ConfigMismatch, match="names 2 replicas for 3 processes"):
        place(config, Ranks(2, 3, 2, 3))


@pytest.mark.parametrize("names", [["cuda:0+cuda:9"], ["cuda:0", "cuda:0+cuda:1"], ["cuda:0+"], [], ["cuda:0", "cpu"]])
def test_names_that_cannot_be_are_refused(gpus: Callable[[int], None], names: list[str]) -> None:
    gpus(4)
    with pytest.raises(ConfigMismatch, match=r"target\.devices"):
        replicas(names)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("final", [False, True])
def test_a_target_over_several_devices_gives_the_same_features(name: str, final: bool) -> None:
    """Bit for bit, and no layer behind the last tap is called. Both parts lie on the CPU, behind accelerate's hooks."""
    torch.manual_seed(0)
    whole = hf.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    parts = hf.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    parts.load_state_dict(whole.state_dict())
    placed = balanced(parts, [1 << 30, 1 << 30], torch.float32)
    assert placed is not None
    assert set(placed.values()) == {0, 1}
    dispatch_model(parts, dict.fromkeys(placed, CPU), force_hooks=True)
    called = []
    for number, layer in enumerate(decoder_layers(parts)):
        layer.register_forward_pre_hook(lambda *_, number=number: called.append(number))
    one, several = Target(whole, (1, 3), final), Target(parts, (1, 3), final)
    expected, found = one.features(IDS), several.features(IDS)
    assert hasattr(parts.model.layers[3], "_hf_hook")
    assert called == list(range(6 if final else 4))
    assert torch.equal(found, expected)
    embedding, head = several.ends(CPU)
    assert torch.equal(embedding(IDS), one.ends(CPU)[0](IDS))
    assert torch.equal(head.weight, one.ends(CPU)[1].weight)


def test_ids_go_to_the_first_device_and_features_come_from_that_of_the_last_tap() -> None:
    made = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    made.model.layers[3:].to("meta")  # another device than the CPU that every machine has
    meta = torch.device("meta")
    assert Target(made, (1, 2)).devices == (CPU,)
    assert Target(made, (1, 3)).devices == Target(made, (1, 2), final=True).devices == (CPU, meta)
    hooked = dispatch_model(hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]), {"": CPU}, force_hooks=True)
    moved = _moved(hooked.model.embed_tokens, meta)
    assert (moved.weight.device, hasattr(moved, "_hf_hook")) == (meta, False)


def test_layers_are_balanced_within_the_room_there_is() -> None:
    model = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    size = 4 * sum(p.numel() for p in model.model.layers[0].parameters())

    def layers(*rooms: int) -> list[int] | None:
        placed = balanced(model, list(rooms), torch.float32)
        if placed is None:
            return None
        return [next(where for name, where in placed.items() if f"layers.{n}." in f"{name}.") for n in range(6)]

    assert layers(1 << 30, 1 << 30) in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1])
    assert set(layers(1 << 30, 1 << 30, 1 << 30) or []) == {0, 1, 2}
    small = layers(int(3.5 * size), 1 << 30)
    assert small is not None
    assert small.count(0) <= 2
    assert layers(2 * size, 2 * size) is None


def test_a_target_that_does_not_fit_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TargetConfig(model=str(target), dtype="float32")
    assert set(device_map(config, [CPU, CPU]).values()) == {CPU}
    monkeypatch.setattr(sharding, "free_bytes", lambda device: 10_000)
    with pytest.raises(ConfigMismatch, match=r"Join more devices with \+"):
        device_map(config, [CPU, CPU])


def three_devices() -> None:
    placement.visible = lambda ranks: [CPU] * 3  # type: ignore[assignment]


def test_the_curve_depends_on_no_placement(make_run: Callable[..., Path], tokens: Path) -> None:
    one = make_run("one", target={"devices": ["cpu"]})
    tiny.run(["train", one, "--tokens", tokens], one / "log")
    joined = make_run("joined", target={"devices": ["cpu+cpu", "cpu"]})
    tiny.run(["train", joined, "--tokens", tokens], joined / "log")
    measured = make_run("measured")
    tiny.run(["train", measured, "--tokens", tokens], measured / "log", before=three_devices)
    for run in (joined, measured):
        tiny.assert_equal(run, one)
    events = [json.loads(line) for line in (measured / "history.jsonl").read_text().splitlines()]
    event = next(event for event in events if event["event"] == "placement")
    assert event["target_s"] > 0
    assert event["drafter_s"] > 0
    assert event["best_processes"] in (1, 3)
    assert len(event["targets"]) == 2 + split(3, event["target_s"], event["drafter_s"]).together
