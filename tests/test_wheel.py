"""The wheel, in an environment that contains only its dependencies, outside the repository.

The environment consists of links to the packages installed here: the distributions required by the wheel's metadata,
and their dependencies. So a dependency that is not declared, a file that is not packed and an import from the
repository fail here.
"""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SCRIPT = """
import importlib.util

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

{readme}

assert importlib.util.find_spec("pytest") is None, "the environment has more than the wheel asks for"


class Stack(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

trainer.fit(Stack(), DataLoader(torch.randn(64, 8), 4))
print("STEPS", trainer.global_step, trainer.world_size, lightning_holmes.__file__, flush=True)
Stack.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
"""


def dependencies(requirement: Requirement, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add to ``found`` the distribution of a requirement, and the distributions that it and its extras require."""
    distribution = importlib.metadata.distribution(requirement.name)
    key = distribution.metadata["Name"].lower()
    if key in found and not requirement.extras:
        return
    found[key] = distribution
    for line in distribution.requires or ():
        inner = Requirement(line)
        asked = inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *requirement.extras))
        if asked:
            dependencies(inner, found)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment's programs, with the wheel installed."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    shutil.copytree(
        ROOT / "lightning_holmes", sources / "lightning_holmes", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True, timeout=120)
    shutil.rmtree(sources)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    installing = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(installing, check=True, capture_output=True, timeout=120)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    link_what_is_required(site, extra="")
    return python.parent


def link_what_is_required(site: Path, *, extra: str) -> None:
    """Link into an environment what the wheel there requires with this extra ("": none)."""
    found: dict[str, importlib.metadata.Distribution] = {}
    (metadata,) = importlib.metadata.distributions(name="lightning-holmes", path=[str(site)])
    for line in metadata.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            dependencies(requirement, found)
    for distribution in found.values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())


def run(command: list[str | Path], folder: Path) -> str:
    kept = {"HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS"}
    clean = {name: value for name, value in os.environ.items() if name in kept}
    path = {"PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean | path | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.xdist_group("wheel")
def test_the_readmes_line_trains_on_two_processes(environment: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    lines = readme.split("```python\n", 1)[1].split("```", 1)[0]
    assert "import lightning_holmes" in lines and 'Trainer(strategy="holmes", num_nodes=8, devices=8)' in lines
    lines = lines.replace("Trainer(", "trainer = Trainer(").replace(
        "num_nodes=8, devices=8", "devices=2, accelerator='cpu', max_epochs=1, logger=False, enable_progress_bar=False"
    )
    (tmp_path / "train.py").write_text(SCRIPT.format(readme=lines))
    output = run([environment / "python", "train.py"], tmp_path)
    assert output.count("STEPS 8 2") == 2 and str(environment.parent) in output and str(ROOT) not in output


MINE = """
import torch
from lightning_holmes.data import CountedDataModule

class Ids(CountedDataModule):
    def __init__(self):
        super().__init__(batch_size=4)

    def train_dataloader(self):
        return self.make_train_loader([{"input_ids": row} for row in torch.randint(0, 50, (32, 8))])
"""
CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  strategy: holmes
  max_steps: 2
  logger: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: saved, save_last: true}
model:
  class_path: lightning_holmes.models.HFCausalLM
  init_args: {pretrained: base}
data:
  class_path: mine.Ids
"""


@pytest.mark.xdist_group("wheel")
def test_the_commands_run_on_a_pretrained_folder_and_ones_own_data(environment: Path, tmp_path: Path) -> None:
    """Comes last: the extra `hf` is added to the environment."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install lightning-holmes[hf]")
    (site,) = (environment.parent / "lib").glob("python*/site-packages")
    link_what_is_required(site, extra="hf")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def command(*arguments: str) -> str:
        return run([environment / "lightning-holmes", *arguments], tmp_path)

    command("fit", "--config", "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == CONFIG, "a run without a logger must not overwrite it"
    assert "exact" in command("check", "--config", "config.yaml")
    assert "candidates" in command("plan", "--config", "config.yaml", "--device_type", "A100-80GB")
    assert socket.gethostname() in command("topology")
    command("convert", "saved/last.ckpt", "tuned", "--format", "safetensors")
    assert (tmp_path / "tuned" / "model.safetensors").is_file() and (tmp_path / "tuned" / "config.json").is_file()
