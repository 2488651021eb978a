"""lightning-holmes plan: the recipe's own config, a large model without weights, and refusals."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, TorchCheckpointIO
from tanh_net import ByGradient
from test_cli import ROOT, _from_the_root, done, planned, refused, run  # noqa: F401
from torch import nn

from lightning_holmes.commands.plan_command import parse_batch_shape, strategy_settings
from lightning_holmes.commands.plan_devices import precision_of
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan

RECIPE = ["plan", "--config", "recipes/gpt_tiny/config.yaml", "--data.init_args.max_bytes=50000"]
LARGE = """
trainer:
  num_nodes: 16
  devices: 8
  precision: bf16-true
  strategy: {class_path: lightning_holmes.HolmesStrategy, init_args: {topology: TOPOLOGY}}
model:
  class_path: recipes.gpt.GPT
  init_args: {vocab_size: 51200, hidden_size: 8192, num_layers: 24, num_heads: 64, sequence_length: 2048}
"""
TOPOLOGY = """
clusters:
  - name: east
    hosts: [{name: e, count: 8, devices: 8, nics: [{name: ib, kind: infiniband, bandwidth: 1.6 Tbit/s},
                                                   {name: eth, kind: ethernet, bandwidth: 25 Gbit/s}]}]
  - name: west
    hosts: [{name: w, count: 8, devices: 8, nics: [{name: rc, kind: roce, bandwidth: 1.6 Tbit/s},
                                                   {name: eth, kind: ethernet, bandwidth: 25 Gbit/s}]}]
links: [{ends: [east, west], transport: ethernet, bandwidth: 25 Gbit/s, latency: 1 ms}]
"""


def test_the_recipe_is_planned_from_its_own_config(capsys, tmp_path):
    out = done(capsys, *RECIPE, "--device_type=A100-80GB", f"--plot={tmp_path / 'step.png'}")
    assert "GPT: 4 layers" in out and "a batch of 32; east: 2 x A100-80GB" in out and "Chosen: " in out
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_what_the_config_fixes_stays_fixed(capsys):
    fixed = ["--trainer.strategy.init_args.pipeline_parallel_size=4", "--trainer.strategy.init_args.schedule=gpipe"]
    data = planned(capsys, *RECIPE, *fixed, "--device_type=here", "--format=json")
    found = {
        (e["pipeline_parallel_size"], e["num_microbatches"], e["schedule"]) for e in (data["best"], *data["runners_up"])
    }
    assert found == {(4, 4, "gpipe")}
    assert data["batch_samples"] == 16


def test_a_topology_with_an_optimizer_host_is_planned_with_it(capsys, tmp_path):
    card = "nics: [{name: eth, kind: ethernet, bandwidth: 1 Gbit/s}]"
    path = tmp_path / "topology.yaml"
    path.write_text(
        f"clusters: [{{name: c, hosts: [{{name: w, count: 2, devices: 2, {card}}}, {{name: cpu, role: optimizer}}]}}]"
    )
    data = planned(capsys, *RECIPE, f"--topology={path}", "--device_type=A100-80GB", "--format=json")
    best, parameters = data["best"], data["model"]["num_parameters"]
    assert best["schedule"] == "breadth_first" and not best["sharded_parameters"]
    assert best["optimizer_nodes"]["count"] == 1
    assert best["optimizer_nodes"]["memory_bytes"] == pytest.approx(16 * parameters, rel=1e-3)
    assert best["optimizer_nodes"]["received_bytes"] == pytest.approx(
        best["data_parallel_size"] * 4 * parameters, rel=1e-3
    )


def test_arguments_of_the_strategy_change_the_prediction_as_they_change_a_run(capsys):
    fixed = ["--trainer.strategy.init_args.pipeline_parallel_size=2", "--trainer.strategy.init_args.schedule=1f1b"]
    found = []
    for more in ([], ["sharding=optimizer", "compression=bf16"]):
        given = [f"--trainer.strategy.init_args.{argument}" for argument in more]
        found.append(planned(capsys, *RECIPE, *fixed, *given, "--device_type=A100-80GB", "--format=json")["best"])
    plain, given = found
    assert (plain["sharded_optimizer"], given["sharded_optimizer"]) == (False, True), "auto: the states are small"
    assert given["exposed_s"]["pipeline"] < plain["exposed_s"]["pipeline"]
    assert max(given["memory_bytes"]) < max(plain["memory_bytes"])
    wrong = ["--trainer.strategy.init_args.compression=zip", "--device_type=A100-80GB"]
    refused(capsys, *RECIPE, *wrong, says=["compression"])


def test_a_plan_file_is_written_and_planned_with(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    assert f"written: {path}" in done(capsys, *RECIPE, "--device_type=A100-80GB", f"--output={path}")
    plan = Plan.load(path)
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.mkdir()
    path.rename(checkpoint / "plan.yaml")
    given = [f"--trainer.strategy.init_args.plan={checkpoint}", "--trainer.strategy.init_args.num_microbatches=auto"]
    best = planned(capsys, *RECIPE, *given, "--device_type=A100-80GB", "--format=json")["best"]
    assert (best["schedule"], best["num_microbatches"]) == (plan.schedule, plan.num_microbatches)
    assert tuple(best["partition"]) == plan.partition.layer_counts
    fixed = ["--trainer.strategy.init_args.pipeline_parallel_size=2", "--sharding=optimizer"]
    shared = tmp_path / "shared.yaml"
    done(capsys, *RECIPE, *fixed, "--device_type=A100-80GB", f"--output={shared}")
    made = Plan.load(shared)
    assert (made.sharding, made.collectives, made.data_parallel_size) == ("optimizer", ("reduce_scatter",) * 2, 2)
    given += ["--device_type=A100-80GB", "--model.init_args.num_layers=6"]
    refused(capsys, *RECIPE, *given, says=["is not for this run", "layers, this model has 6"])


def test_a_model_far_larger_than_this_machine(capsys, tmp_path):
    (tmp_path / "topology.yaml").write_text(TOPOLOGY)
    (tmp_path / "config.yaml").write_text(LARGE.replace("TOPOLOGY", str(tmp_path / "topology.yaml")))
    shape = "--batch_shape=input_ids=12x2048:int64,labels=12x2048:int64"
    command = ["plan", "--config", str(tmp_path / "config.yaml"), shape, "--device_type=A100-80GB", "--format=json"]
    more = ["--batch_samples=1536", "--tensor_parallel_sizes=[1,8]", "--sharding=optimizer"]
    more += ["--model.init_args.gradient_checkpointing=true"]
    data = planned(capsys, *command, *more)
    assert data["model"]["layers"][0]["parameter_bytes"] == pytest.approx(2 * 12 * 8192**2, rel=1e-3)
    assert sum(data["best"]["partition"]) == 24 and data["best"]["tokens_per_s"] > 0
    said = ["GiB a device are missing", "What can make it fit"]
    refused(capsys, *command, "--trainer.strategy.init_args.pipeline_parallel_size=1", says=said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--device_type", "A100-80GB", "--device_type here"]),
        (["--device_type=A300"], ["'A300'", "Known are", "speed=100e12,memory=40e9"]),
        (["--device_type=east:A100-80GB"], ["'east:A100-80GB'", "Known are"]),
        (["--device_type=T4", "--batch_shape=1x2", "--plot=step.jpg"], ["--plot='step.jpg'", ".png or .svg"]),
        (
            ["--device_type=T4", "--trainer.strategy.init_args.num_microbatches=300"],
            ["num_microbatches=300 is more than the 16 samples of a replica"],
        ),
        (["--device_type=T4", "--plot=/no/such/folder/x.png"], ["--plot", "does not exist"]),
        (["--device_type=T4", "--batch_shape=input_ids=0x9"], ["batch_shape", "at least 1"]),
        (["--device_type=T4", "--batch_samples=0"], ["batch_samples=0"]),
    ],
)
def test_refused(capsys, options, words):
    refused(capsys, *RECIPE, *options, says=words)


class Reads(ByGradient):
    """A step that reads a value on the host; the module defines its own batch."""

    def __init__(self, hidden_size: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(hidden_size, hidden_size) for _ in range(4)))
        self.example_input_array = torch.ones(4, hidden_size)

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        return loss * (2 if loss.item() > 0 else 1)


class Runs(Reads):
    """The same module without the read."""

    def training_step(self, batch, batch_idx):
        return 2 * self.blocks(batch).square().mean()


class Asks(Runs):
    """A module whose step reads an attribute of its trainer."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (2.0 if self.trainer.global_step == 0 else 1.0)


class Manual(Runs):
    """A module that calls its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()


class Late(Runs):
    """A module whose blocks are made by configure_model, beside a parameter made in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.scale = nn.Parameter(torch.ones(()))

    def configure_model(self):
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


class SetUp(Runs):
    """A module whose blocks are made in setup()."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def setup(self, stage):
        assert stage == "fit" and self.trainer.world_size == 1
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


class AsksARun(Runs):
    """A module whose setup() needs something that only a run has."""

    def setup(self, stage):
        self.classes = self.trainer.datamodule.classes


class Adapted(Runs):
    """A module whose configure_model adds to layers made in ``__init__``; a second call would add them twice."""

    def configure_model(self):
        for index, block in enumerate(self.blocks):
            self.blocks[index] = nn.Sequential(block, nn.Linear(8, 8, bias=False))


class Shares(Runs):
    """A module whose configure_model requires a device mesh."""

    def configure_model(self):
        self.device_mesh["tensor_parallel"]


class Bare(Runs):
    """The same module without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = None


SMALL = ["plan", "--trainer.strategy=holmes", "--trainer.devices=2", "--device_type=T4", "--format=json"]


def test_a_step_that_reads_values_is_run_once_as_in_fit_and_the_batch_may_be_the_modules_own_example(capsys):
    found = [planned(capsys, *SMALL, f"--model={__name__}.{name}") for name in ("Reads", "Runs")]
    reads, runs = (data["model"]["layers"] for data in found)
    assert reads == runs and reads[0]["forward"] == 2 * 8 * 8, "a sample through a matrix"
    assert found[0]["batch_samples"] == 8, "four samples of the example for each of two replicas"


def test_configure_model_runs_once_whatever_init_has_built(capsys):
    found = {}
    for name in ("Runs", "Late", "SetUp", "AsksARun", "Adapted"):
        options = ["--format=json", f"--model={__name__}.{name}"]
        found[name] = planned(capsys, *SMALL, *options)["model"]
        module = globals()["Runs" if name in ("SetUp", "AsksARun") else name]()
        module.configure_model()
        size = sum(p.numel() for p in module.parameters())
        assert found[name]["num_parameters"] == size
    assert [model["layer_list"] for model in found.values()] == ["blocks"] * 5
    bytes_of = {name: [layer["parameter_bytes"] for layer in model["layers"]] for name, model in found.items()}
    assert bytes_of["Late"] == bytes_of["SetUp"] == bytes_of["AsksARun"] == bytes_of["Runs"] == [4 * (64 + 8)] * 4
    assert bytes_of["Adapted"] == [4 * (64 + 8 + 64)] * 4
    assert found["Adapted"]["layers"][1]["forward"] == 2 * found["Runs"]["layers"][1]["forward"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(2, ["which network joins", "--topology FILE", "count: 2"]), (0, ["at least 1"]), (-1, ["at least 1"])],
)
def test_several_hosts_are_those_of_a_file(capsys, tmp_path, number, words):
    given = [f"--model={__name__}.Runs", f"--trainer.num_nodes={number}"]
    err = refused(capsys, *SMALL, *given, says=[f"num_nodes={number}", *words])
    if number > 1:
        path = tmp_path / "all.yaml"
        path.write_text(re.search(r"clusters: \[.*\](?=, and give)", err.replace("\n", " "))[0])
        assert planned(capsys, *SMALL, *given, f"--topology={path}")["clusters"][0]["devices"] == 16


def test_a_step_may_ask_its_trainer_and_what_fit_refuses_is_refused(capsys):
    assert planned(capsys, *SMALL, f"--model={__name__}.Asks")["model"]["name"] == "Asks"
    refused(capsys, *SMALL, f"--model={__name__}.Manual", says=["Manual uses manual optimization"])


def test_a_configure_model_that_needs_ranks_is_told_that_there_are_none(capsys):
    said = ["Shares.configure_model", "only if self.device_mesh is not None"]
    refused(capsys, *SMALL, f"--model={__name__}.Shares", says=said)


@pytest.mark.parametrize(
    ("devices", "count"), [("2", 2), ("0,1", 2), ("0,", 1), ("[0,1,3]", 3), ("auto", 8), ("-1", 8)]
)
def test_devices_are_counted_as_lightning_counts_them(capsys, monkeypatch, devices, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    data = planned(capsys, *SMALL, f"--trainer.devices={devices}", f"--model={__name__}.Runs")
    assert data["clusters"][0]["devices"] == count


@pytest.mark.parametrize("devices", ["auto", "-1"])
def test_all_devices_of_a_host_are_those_of_the_topology_or_have_to_be_said(capsys, monkeypatch, tmp_path, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    command = [*SMALL, f"--trainer.devices={devices}", f"--model={__name__}.Runs"]
    refused(capsys, *command, says=[f"trainer.devices={devices!r}", "--topology FILE"])
    (tmp_path / "topology.yaml").write_text("clusters: [{name: c, hosts: [{name: h, devices: 4}]}]")
    assert planned(capsys, *command, f"--topology={tmp_path / 'topology.yaml'}")["clusters"][0]["devices"] == 4
    assert planned(capsys, *command, "--trainer.accelerator=cpu")["clusters"][0]["devices"] == 1


def test_no_devices_are_refused(capsys):
    said = ["trainer.devices='0'", "a number of at least 1"]
    refused(capsys, *SMALL, "--trainer.devices=0", f"--model={__name__}.Runs", says=said)


def test_a_large_module_that_reads_values_is_refused_and_told_why(capsys, monkeypatch):
    monkeypatch.setattr("lightning_holmes.commands.plan_command.LARGEST_RUN", 100)
    reasons = ["288 parameters", "leave the value out", "up to 100 are"]
    said = ["Reads.training_step does not run on tensors without values", *reasons]
    refused(capsys, *SMALL, f"--model={__name__}.Reads", says=said)


def test_what_does_not_fit_is_planned_refused_and_told_as_in_a_run(capsys, tmp_path):
    """Two layers per rank; with AdamW's states they take 8.4 MB, half of that states, plus activations."""

    def plan(memory: float, **asked: object) -> tuple[int, str, str]:
        settings = {"pipeline_parallel_size": 2, "schedule": "1f1b", "num_microbatches": 4, **asked}
        given = [f"--trainer.strategy.init_args.{name}={value}" for name, value in settings.items()]
        if "plan" in asked:
            given = given[-1:]
        head = ["plan", "--trainer.strategy=lightning_holmes.HolmesStrategy", "--trainer.devices=2"]
        device = f"--device_type=speed=1e12,memory={memory}"
        model = [f"--model={__name__}.Runs", "--model.init_args.hidden_size=512"]
        return run(capsys, *head, *given, device, *model, *options)

    path = tmp_path / "plan.yaml"
    options = ["--format=json", f"--output={path}"]
    code, out, err = plan(1e9)
    assert code == 0, err
    roomy = json.loads(out[out.index("{") :])
    assert roomy["memory_note"] is None
    states = 2 * 4 * 2 * (512**2 + 512)
    scarce = (max(roomy["best"]["memory_bytes"]) - states / 2) / 0.92
    with_states, by_hand = "memory: with an optimizer that keeps two numbers", "memory: by its estimate "

    options = ["--format=json"]
    for memory, asked, words in (
        (scarce, {"partition": "uniform"}, with_states),
        (scarce, {}, with_states),
        (scarce, {"partition": "[2,2]"}, by_hand),
        (1e6, {"partition": "[2,2]"}, by_hand),
        (1e6, {"plan": path}, by_hand),
    ):
        code, out, err = plan(memory, **asked)
        assert code == (1 if memory == 1e6 else 0), "with no optimizer at all it would fit"
        data = json.loads(out[out.index("{") :])
        assert data["memory_note"].startswith(words) and "GiB a device are missing at the least" in data["memory_note"]
        assert data["best"]["partition"] == [2, 2]
        held = max(roomy["best"]["memory_bytes"]) - (states if words == with_states else 0)
        assert max(data["best"]["memory_bytes"]) == held

    whole = tmp_path / "whole.yaml"  # as a run without a pipeline writes it
    saved = dataclasses.replace(
        Plan.load(path),
        pipeline_parallel_size=1,
        data_parallel_size=2,
        layers=WHOLE_MODULE,
        partition=Partition((1,)),
        placement=Placement(((0, 1),)),
        clusters=("cluster0",),
        groups=(),
    )
    saved.save(whole)
    code, out, err = plan(1e6, plan=whole)
    assert code == 1 and json.loads(out[out.index("{") :])["memory_note"].startswith(by_hand), err

    code, _, err = plan(1e6)
    assert code == 2 and "fits none of" in err and "an optimizer that keeps nothing" in err

    written = tmp_path / "scarce.yaml"
    options = [f"--output={written}"]
    code, out, err = plan(scarce)
    assert code == 0 and f"WARNING: {with_states}" in " ".join(out.split()), err
    assert any(note.startswith(with_states) for note in Plan.load(written).notes)


def test_without_any_batch_the_three_ways_to_give_one_are_named(capsys):
    said = ["data module", "Bare.example_input_array", "--batch_shape"]
    refused(capsys, *SMALL, f"--model={__name__}.Bare", says=said)


def documented_keys() -> dict[str, set[str]]:
    """Return, by heading of the documentation's part on JSON, the keys in the first column of its table."""
    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    heading = ""
    for line in text[text.index("## JSON\n") :].splitlines():
        if line.startswith("## ") and found:
            break
        heading = line.lstrip("# ") if line.startswith("#") else heading
        if line.startswith("| `"):
            found.setdefault(heading, set()).update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


def test_precision_counts(capsys):
    def step_s(*more: str) -> float:
        return planned(capsys, *RECIPE, "--format=json", *more)["best"]["step_s"]

    half, fp32 = (step_s("--device_type=A100-80GB", f"--trainer.precision={p}") for p in ("bf16-mixed", "32-true"))
    assert half < fp32


def topology_of(path: Path, *kinds: str) -> str:
    """Return an option that names a file with a cluster of one host for each type."""
    host = "{name: h%d, devices: 2, device_type: %s, nics: [{name: e, kind: ethernet, bandwidth: 10 Gbit/s}]}"
    hosts = ", ".join(host % entry for entry in enumerate(kinds))
    path.write_text(f"clusters: [{{name: c, hosts: [{hosts}]}}]")
    return f"--topology={path}"


def test_types_of_hosts_are_those_of_the_file_and_said_once(capsys, tmp_path):
    unlike = topology_of(tmp_path / "unlike.yaml", "A100-80GB", "A100-40GB")
    command = [*[entry for entry in SMALL if "device_type" not in entry], f"--model={__name__}.Runs", unlike]
    strategy = ["--trainer.strategy=lightning_holmes.HolmesStrategy"]
    data = planned(capsys, *command, *strategy, "--trainer.strategy.init_args.pipeline_parallel_size=2")
    assert data["clusters"][0]["device_type"] == "A100-80GB and A100-40GB"
    assert [limit / 2**30 for limit in data["best"]["memory_limit_bytes"]] == pytest.approx([0.92 * 80, 0.92 * 40])
    refused(capsys, *SMALL, f"--model={__name__}.Runs", unlike, says=["device_type='T4'", "leave one of the two out"])


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        ({}, "32-true"),
        ({"precision": 16}, "16-mixed"),
        ({"precision": "bf16"}, "bf16-mixed"),
        ({"precision": 64}, "64-true"),
        ({"precision": "bf16-true", "plugins": []}, "bf16-true"),
        ({"precision": "bf16-true", "plugins": [TorchCheckpointIO()]}, "bf16-true"),
    ],
)
def test_precision_is_read_as_a_trainer_reads_it(trainer, name):
    assert precision_of(trainer) == name


class Custom(HalfPrecision):
    """A user-defined precision."""


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"precision": "transformer-engine"}, "trainer.precision='transformer-engine'.*--trainer.precision=bf16-true"),
        ({"plugins": [Custom()]}, "trainer.plugins=Custom.*--trainer.plugins=null"),
        ({"plugins": {"class_path": "lightning.pytorch.plugins.BitsandbytesPrecision"}}, "Bitsandbytes"),
        ({"plugins": [HalfPrecision()]}, "plugins=HalfPrecision: plan reads the precision from trainer.precision"),
    ],
)
def test_a_precision_that_is_not_known_is_refused(trainer, words):
    with pytest.raises(ConfigurationError, match=words):
        precision_of(trainer)


class BuildsInFloat32(ByGradient):
    """A module that sets a dtype itself, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float32) for _ in range(4))
        self.register_buffer("scale", torch.ones(8, dtype=torch.float32))

    def training_step(self, batch, batch_idx):
        x = batch.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = layer(x * self.scale)
        return x.square().mean()


def test_a_module_that_makes_float32_itself_is_predicted_as_the_trainer_converts_it(capsys):
    found = {}
    for precision in ("32-true", "bf16-true"):
        options = [f"--trainer.precision={precision}", f"--model={__name__}.BuildsInFloat32", "--batch_shape=4x8"]
        found[precision] = planned(capsys, "plan", *options, *SMALL[1:])["model"]
    assert found["32-true"]["parameter_itemsize"] == 4 and found["bf16-true"]["parameter_itemsize"] == 2
    wide, narrow = (sum(layer["parameter_bytes"] for layer in found[precision]["layers"]) for precision in found)
    assert wide == 2 * narrow == 4 * (64 + 8) * 4


def test_every_key_of_the_json_is_documented_and_the_reverse(capsys):
    data = planned(capsys, *RECIPE, "--device_type=A100-80GB", "--format=json")
    plans = set(data["best"])
    assert data["runners_up"] and set(data["runners_up"][0]) == plans
    assert documented_keys() == {
        "JSON": set(data),
        "The model": set(data["model"]),
        "A layer": set(data["model"]["layers"][0]),
        "A cluster": set(data["clusters"][0]),
        "A plan": plans,
    }
    assert set(data["model"]["before"]) == set(data["model"]["after"]) == set(data["model"]["layers"][0])
    assert set(data["best"]["exposed_s"]) == {"pipeline", "data_parallel", "tensor_parallel"}


def test_batch_shapes():
    assert parse_batch_shape("4x3x8").shape == (4, 3, 8)
    batch = parse_batch_shape("x=2x3,y=2:int64")
    assert {name: (tuple(t.shape), str(t.dtype)) for name, t in batch.items()} == {
        "x": ((2, 3), "torch.float32"),
        "y": ((2,), "torch.int64"),
    }
    for text in ("4x", "x=2,3", "4:int63", "x=2x-3"):
        with pytest.raises(ConfigurationError, match="batch_shape"):
            parse_batch_shape(text)


def test_another_strategy_is_refused():
    assert strategy_settings("auto") == strategy_settings(None) == strategy_settings("holmes") == {}
    for name in ("ddp", "lightning_holmes.HolmesStrategy"):  # of which a Trainer takes none, or another one
        with pytest.raises(ConfigurationError, match=f"'{name}'.*use strategy: holmes"):
            strategy_settings(name)
    with pytest.raises(ConfigurationError, match="DDPStrategy"):
        strategy_settings({"class_path": "lightning.pytorch.strategies.DDPStrategy"})
