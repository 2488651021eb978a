"""Every recipe: its files, its round trip through --print_config, its model without weights and its plan; some
recipes are run."""

import contextlib
import io
import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from launch import launch
from test_cli import ROOT, _from_the_root, done, planned, run  # noqa: F401

from lightning_holmes import HolmesStrategy, loggers
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.convert import main as convert

RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/config.yaml"))
# a batch of one replica, and the parameters of the whole model, counted by hand below
LARGE = {
    "gpt_3.6b": ("input_ids=32x2048:int64,labels=32x2048:int64", 30, 3072, 16),
    "gpt_7.5b": ("input_ids=32x2048:int64,labels=32x2048:int64", 36, 4096, 32),
    "gpt_39.1b": ("input_ids=64x2048:int64,labels=64x2048:int64", 48, 8192, 16),
    "llama_8b": ("input_ids=32x8192:int64", 32, None, 32),
}
# one cluster, whose devices are too small for the whole model
ONE_CLUSTER = {
    "llama_3b_layered": ("input_ids=12x2048:int64", "speed=60e12,memory=24e9"),
    "llama_7b_nodes": ("input_ids=16x2048:int64", "speed=60e12,memory=16e9"),
}
FINETUNE = ("finetune", "finetune_lora")


def config_of(recipe: str) -> str:
    return f"recipes/{recipe}/config.yaml"


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_and_round_trip(capsys, tmp_path, recipe):
    folder = ROOT / "recipes" / recipe
    topology = Topology.from_yaml(folder / "topology.yaml")
    assert len(topology.clusters) == (1 if recipe in ONE_CLUSTER else 2)
    text = (folder / "README.md").read_text()
    for word in (f"recipes/{recipe}/config.yaml", "torchrun", "sbatch", "MASTER_PORT"):
        assert word in text, word
    out = done(capsys, "fit", "--config", config_of(recipe), "--print_config")
    printed = yaml.safe_load(out)
    assert printed["trainer"]["strategy"]["init_args"]["topology"] == f"recipes/{recipe}/topology.yaml"
    nodes, devices = printed["trainer"]["num_nodes"], printed["trainer"]["devices"]
    assert nodes * devices == topology.num_devices or (nodes, devices) == (1, topology.num_devices)
    (tmp_path / "again.yaml").write_text(out)
    assert done(capsys, "fit", "--config", str(tmp_path / "again.yaml"), "--print_config") == out


def command_of_each_node(job: str, first_node: int, nodes: int, folder: Path) -> list[list[str]]:
    """Return the arguments with which job.sh starts each node of one cluster: srun and torchrun are stand-ins that
    print their arguments."""
    stand_ins = {
        "srun": f'for i in $(seq 0 {nodes - 1}); do SLURM_NODEID=$i "$@" || exit; done',
        "torchrun": """printf '%s\\n' "$@"; echo END""",
    }
    for name, text in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_text(job)
    subprocess.run(["bash", "-n", script], check=True)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "MASTER_ADDR": "10.0.0.1", "FIRST_NODE": str(first_node)}
    out = subprocess.run(["bash", script], env=env, check=True, capture_output=True, text=True).stdout
    return [text.split("\n")[:-1] for text in out.split("END\n")[:-1]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_slurm_script_starts_every_node_of_all_clusters(capsys, tmp_path, recipe):
    text = (ROOT / "recipes" / recipe / "README.md").read_text()
    block = re.search(r"    # job\.sh\n((?:    .*\n)+)", text)
    assert block is not None
    job = "".join(f"{line[4:]}\n" for line in block[1].splitlines())
    nodes = int(re.search(r"--nodes=(\d+)", job)[1])
    firsts = [int(n) for n in re.findall(r"FIRST_NODE=(\d+) sbatch", text)]
    # each cluster has its own SLURM controller
    assert firsts == [cluster * nodes for cluster in range(1 if recipe in ONE_CLUSTER else 2)]
    commands = [c for first in firsts for c in command_of_each_node(job, first, nodes, tmp_path)]
    ranks = []
    for command in commands:
        split = command.index("--no-python")
        given = dict(zip(command[:split:2], command[1:split:2], strict=True))
        assert given["--master_addr"] == "10.0.0.1" and given["--master_port"] == "29500"
        ranks.append(int(given["--node_rank"]))
        assert command[split + 1 : split + 3] == ["lightning-holmes", "fit"]
    num_nodes = len(firsts) * nodes
    assert ranks == list(range(num_nodes)) and given["--nnodes"] == str(num_nodes)
    trainer = yaml.safe_load(done(capsys, *command[split + 2 :], "--print_config"))["trainer"]
    assert (trainer["num_nodes"], int(trainer["devices"])) == (num_nodes, int(given["--nproc_per_node"]))


@pytest.mark.parametrize("recipe", ONE_CLUSTER)
def test_a_model_too_large_for_a_worker_fits_in_shards_or_on_nodes_only(capsys, tmp_path, recipe):
    shape, device = ONE_CLUSTER[recipe]
    text = (ROOT / "recipes" / recipe / "README.md").read_text()
    config = yaml.safe_load((ROOT / config_of(recipe)).read_text())["trainer"]["strategy"]["init_args"]
    command = ["plan", "--config", config_of(recipe), f"--batch_shape={shape}", f"--device_type={device}"]
    assert " ".join([f"lightning-holmes plan --config {config_of(recipe)}", "--data null"]) in text
    best = planned(capsys, *command, "--data=null", "--format=json")["best"]
    on_nodes = best["optimizer_nodes"] is not None
    assert best["sharded_parameters"] == (recipe == "llama_3b_layered") != on_nodes
    assert best["schedule"] == "breadth_first"
    assert best["num_microbatches"] == config["num_microbatches"] == int(shape.split("=")[1].split("x")[0])
    assert max(best["memory_bytes"]) < min(best["memory_limit_bytes"]) and max(best["memory_bytes"]) > 0.5 * float(
        device.split("memory=")[1]
    )
    predicted = f"{best['step_s']:.1f} s a step"
    assert predicted in text, f"{predicted}; {max(best['memory_bytes']) / 2**30:.1f} GiB"
    assert (
        f"{max(best['memory_bytes']) / 2**30:.1f} of {min(best['memory_limit_bytes']) / 2**30:.1f} GiB a"
        in " ".join(text.split())
    )
    without = yaml.safe_load((ROOT / "recipes" / recipe / "topology.yaml").read_text())
    hosts = without["clusters"][0]["hosts"]
    hosts[:] = [host for host in hosts if host.get("role") != "optimizer"]
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump(without))
    whole = ["--trainer.strategy.init_args.sharding=optimizer", f"--topology={tmp_path / 'topology.yaml'}"]
    code, _, err = run(capsys, *command, "--data=null", *whole)
    assert code != 0 and "NothingFitsError" in err and "GiB a device are missing" in err, err
    assert on_nodes or 'parameters in shards, sharding="parameters"' in err, err


def output_of(args):
    """Return the output of a command; runs in a separate process."""
    from lightning_holmes.cli import main

    os.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(args)
    return printed.getvalue()


@pytest.mark.parametrize("recipe", LARGE)
def test_a_large_models_plan_is_that_of_its_config(recipe):
    """Runs in a separate process, as commands do."""
    shape, layers, hidden, num_microbatches = LARGE[recipe]
    config = yaml.safe_load((ROOT / config_of(recipe)).read_text())
    command = ["plan", "--config", config_of(recipe), f"--batch_shape={shape}", "--device_type=A100-80GB"]
    (out,) = launch(1, "test_recipes:output_of", [*command, "--data=null", "--format=json"], timeout_s=120)
    data = json.loads(out[out.index("{") :])
    strategy = config["trainer"]["strategy"]["init_args"]
    assert data["best"]["pipeline_parallel_size"] == strategy["pipeline_parallel_size"]
    assert data["best"]["tensor_parallel_size"] == strategy.get("tensor_parallel_size", 1)
    assert data["best"]["num_microbatches"] == strategy["num_microbatches"] == num_microbatches
    assert sum(data["best"]["partition"]) == layers == len(data["model"]["layers"])
    parameters = data["model"]["layers"][0]["parameter_bytes"] / 4
    if hidden is not None:
        assert parameters == 12 * hidden**2 + 2 * hidden
        assert config["model"]["init_args"]["num_layers"] == layers
    else:  # attention with grouped keys, gated MLP, two norms
        assert parameters == 4096**2 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    samples, replicas = int(shape.split("=")[1].split("x")[0]), data["best"]["data_parallel_size"]
    assert config["data"]["init_args"]["batch_size"] == samples and data["batch_samples"] == samples * replicas


@pytest.fixture(scope="module")
def tune(tmp_path_factory):
    """Return the folder of a tiny model with its tokenizer, and a token file."""
    pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("tune")
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=4, max_position_embeddings=64, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    text = b"".join(path.read_bytes() for path in sorted(ROOT.glob("recipes/*/README.md")))
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / "tune.bin")
    return folder


def lines_in(folder: Path) -> list[str]:
    """Return the options for a CSV file of every step in ``folder``."""
    return [
        "--trainer.log_every_n_steps=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.callbacks=null",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.init_args.save_dir={folder}",
        "--trainer.logger.init_args.version=0",
    ]


def tune_options(recipe: str, tune: Path, folder: Path) -> list[str]:
    return [
        "fit",
        f"--config={config_of(recipe)}",
        f"--model.init_args.pretrained={tune / 'base'}",
        "--model.init_args.learning_rate=0.02",
        "--model.init_args.warmup_steps=1",
        f"--data.init_args.path={tune / 'tune.bin'}",
        "--data.init_args.dtype=uint16",
        "--data.init_args.sequence_length=32",
        "--trainer.precision=32-true",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
        "--trainer.limit_val_batches=1",
        *lines_in(folder),
    ]


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train_loss")
    return [float(value) for line in lines[1:] if (value := line.split(",")[column])]


def run_cli(payload):
    """Run one command in each process of a job."""
    from lightning_holmes.cli import main

    os.chdir(ROOT)
    for args in payload:
        main(args)


def test_fine_tuning_runs_in_two_processes_as_in_one(tmp_path, tune):
    """Full fine-tuning and LoRA, two stages. Baseline: one process with the same seed, tolerance 1e-4; plain
    Lightning for full fine-tuning, the strategy in one process for LoRA, since adapters get initial values that
    depend on their names there."""
    commands, alone = [], []
    for recipe in FINETUNE:
        plain = tune_options(recipe, tune, tmp_path / f"{recipe}_plain")
        strategy = "init_args.topology=auto" if recipe == "finetune_lora" else "=auto"
        strategy = f"--trainer.strategy.{strategy}".replace(".=", "=")
        alone.append([*plain, strategy, "--trainer.devices=1"])
        staged = tune_options(recipe, tune, tmp_path / f"{recipe}_staged")
        given = ("topology=auto", "pipeline_parallel_size=2", "num_microbatches=2")
        strategy = [f"--trainer.strategy.init_args.{option}" for option in given]
        commands.append([*staged, "--trainer.devices=2", *strategy])
    launch(1, "test_recipes:run_cli", alone, timeout_s=120)
    launch(2, "test_recipes:run_cli", commands, timeout_s=120)
    for recipe in FINETUNE:
        plain, staged = (losses_of(tmp_path / f"{recipe}_{kind}") for kind in ("plain", "staged"))
        assert len(plain) == 4 and plain[-1] < plain[0]
        assert staged == pytest.approx(plain, rel=1e-4)
        logs = tmp_path / f"{recipe}_staged/lightning_logs/version_0"
        assert "pipeline_parallel_size: 2" in (logs / "plan.yaml").read_text()
        assert (logs / "config.yaml").is_file()


def test_the_demo_learns_on_four_processes(tmp_path):
    command = ["fit", f"--config={config_of('gpt_tiny')}", "--trainer.max_steps=20", "--trainer.limit_val_batches=0"]
    command += lines_in(tmp_path)
    launch(4, "test_recipes:run_cli", [command], timeout_s=240)
    losses = losses_of(tmp_path)
    # an untrained model of bytes: log(256) is 5.5
    assert len(losses) == 20 and 5.3 < losses[0] < 5.8
    assert losses[-1] < 3.0


SMALL = ["--model.init_args.hidden_size=16", "--model.init_args.num_layers=2", "--data.init_args.max_bytes=50000"]
SHORT = ["--trainer.max_steps=3", "--trainer.callbacks=null", "--trainer.limit_val_batches=0"]
ALONE = ["--trainer.devices=1", "--trainer.strategy.init_args.topology=auto", "--trainer.log_every_n_steps=1"]


def test_fit_runs_from_a_printed_config_with_tensorboard(capsys, tmp_path):
    pytest.importorskip("tensorboard")
    logger = ["--trainer.logger=TensorBoardLogger", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    save = [f"--trainer.callbacks.{option}" for option in (f"dirpath={tmp_path}", "filename=saved", "save_last=link")]
    save = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3", *save]
    options = [*SMALL, *SHORT, *ALONE, *save, *logger, "--trainer.logger.init_args.version=0"]
    out = done(capsys, "fit", "--config", config_of("gpt_tiny"), *options, "--print_config")
    (tmp_path / "printed.yaml").write_text(out)
    done(capsys, "fit", "--config", str(tmp_path / "printed.yaml"), "--trainer.enable_progress_bar=false")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "lightning_logs/version_0"))
    events.Reload()
    assert len(events.Scalars("train_loss")) == 3
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "|pipeline rank|" in texts["plan/text_summary"] and "hidden_size: 16" in texts["config/text_summary"]
    # the other commands on the checkpoint that fit saved
    saved = tmp_path / "last.ckpt"
    for command, shown in (("validate", "val_loss"), ("test", "test_loss"), ("predict", ""), ("check", "exact")):
        written = tmp_path / f"{command}.yaml"
        options = [*SMALL, *ALONE, "--trainer.logger=false", "--trainer.callbacks=null", f"--ckpt_path={saved}"]
        options += [f"--trainer.limit_{kind}_batches=2" for kind in ("val", "test", "predict")]
        written.write_text(done(capsys, command, "--config", config_of("gpt_tiny"), *options, "--print_config"))
        assert shown in done(capsys, command, "--config", str(written))
    assert not (ROOT / "config.yaml").exists()  # only fit writes it
    # the configuration is used, not the values with which the checkpoint was made
    code, _, err = run(capsys, "test", "--config", str(tmp_path / "test.yaml"), "--model.init_args.hidden_size=32")
    assert code == 2 and "another model than this GPT: size mismatch" in err
    convert([str(saved), str(tmp_path / "folder.ckpt")])
    plain = ["--trainer.strategy=auto", f"--ckpt_path={tmp_path / 'folder.ckpt'}"]
    assert "test_loss" in done(capsys, "test", "--config", str(tmp_path / "test.yaml"), *plain)


@pytest.mark.parametrize("key", [None, "0123456789" * 4])
def test_wandb_stays_offline_without_a_login_or_a_network(tmp_path, key):
    (found,) = launch(1, "test_recipes:run_with_wandb", {"folder": str(tmp_path), "key": key}, timeout_s=120)
    assert found["mode"] == "offline"
    assert found["config"]["config"]["model"]["init_args"]["hidden_size"] == 16
    assert found["config"]["plan"]["pipeline_parallel_size"] == 1
    assert found["columns"] == 5 and found["train_loss"] > 0
    assert found["seconds"] < 60
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert ("nobody is logged in" if key is None else "127.0.0.1:9 does not answer") in found["reason"]


def run_with_wandb(payload):
    """Runs in a separate process, since W&B starts anew only there."""
    folder, key = payload["folder"], payload["key"]
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ |= {"HOME": folder, "NETRC": f"{folder}/netrc", "WANDB_SILENT": "true"}
    os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # no server listens there
    os.environ |= {} if key is None else {"WANDB_API_KEY": key}
    os.chdir(ROOT)
    import wandb

    from lightning_holmes.cli import main

    began = time.monotonic()
    options = [*SMALL, *SHORT, *ALONE, f"--trainer.logger.init_args.save_dir={folder}"]
    main(["fit", "--config", config_of("gpt_tiny"), *options, "--trainer.enable_progress_bar=false"])
    found = {
        "mode": wandb.run.settings.mode,
        "config": wandb.run.config.as_dict(),
        "columns": wandb.run.summary["plan"]["ncols"],
        "train_loss": float(wandb.run.summary["train_loss"]),
        "reason": loggers.why_offline() or "",
    }
    wandb.finish()
    return found | {"seconds": time.monotonic() - began}


def test_every_option_of_the_strategy_is_on_the_command_line(capsys):
    import inspect

    values = {
        "topology": "recipes/gpt_tiny/topology.yaml",
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 1,
        "num_microbatches": 3,
        "eval_num_microbatches": 2,
        "schedule": "eager_1f1b",
        "num_chunks": 1,
        "partition": [3, 1],
        "layers": "layers",
        "broadcast_batch": True,
        "save_distributed_checkpoint": False,
        "async_checkpoint": True,
        "snapshot_every_n_steps": 100,
        "monitor": True,
        "plan": None,
        "gradient_sync": "p2p",
        "compression": "bf16",
        "sharding": "optimizer",
        "optimizer_nodes": 0,
        "optimizer_states": "memory",
        "master_weights": True,
        "timeout": "0:05:00",
    }
    assert set(inspect.signature(HolmesStrategy.__init__).parameters) - {"self"} == set(values)
    options = [f"--trainer.strategy.init_args.{name}={json.dumps(value)}" for name, value in values.items()]
    options = [option.replace('"', "") for option in options]
    out = done(capsys, "fit", "--config", config_of("gpt_tiny"), *options, "--print_config")
    assert yaml.safe_load(out)["trainer"]["strategy"]["init_args"] == values


def test_every_schedule_can_be_named_on_the_command_line():
    from typing import get_args, get_type_hints

    from lightning_holmes.plan.schedule import SCHEDULE_NAMES

    named = get_args(get_type_hints(HolmesStrategy.__init__)["schedule"])
    assert set(named) == {"auto", *SCHEDULE_NAMES}
