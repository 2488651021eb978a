"""State outside of the module that a step changes: equal to plain Lightning on one process, refused by name with stages.

Baseline: plain Lightning on the same batches; equal values on rank 0.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launch import launch
from quiet import quiet_trainer
from tanh_net import TanhNet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_holmes import HolmesStrategy, check
from lightning_holmes.errors import HolmesError
from lightning_holmes.pipeline.outside import Outside

pytestmark = pytest.mark.xdist_group("outside_state")


LOSSES: list[float] = []
TOTAL = 0.0
SUM = torch.zeros(1)
SCALES: dict[int, Tensor] = {}


def remember(loss: float) -> None:
    LOSSES.append(loss)


class Keeps(TanhNet):
    """Keeps a value of each batch somewhere, and reads it at the end of the epoch; ``where``: what the error names."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.keep(loss.item(), batch_idx)
        return loss

    def keep(self, loss: float, batch_idx: int) -> None: ...

    def kept(self) -> list[float]:
        return LOSSES

    def on_train_epoch_end(self) -> None:
        self.found += self.kept()


class InList(Keeps):
    where = "LOSSES of"

    def keep(self, loss: float, batch_idx: int) -> None:
        remember(loss)


class Later(InList):
    def keep(self, loss: float, batch_idx: int) -> None:
        if batch_idx >= 3:
            LOSSES.append(loss)


class InGlobal(Keeps):
    where = "TOTAL of"

    def keep(self, loss: float, batch_idx: int) -> None:
        global TOTAL
        TOTAL += loss

    def kept(self) -> list[float]:
        return [TOTAL]


class InHook(Keeps):
    where = "HOLDS of"

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(HOLDS.notice)

    def kept(self) -> list[float]:
        return HOLDS.losses


class InGradient(Keeps):
    where = "LOSSES of"

    def __init__(self) -> None:
        super().__init__()
        self.layers[3][0].weight.register_hook(lambda gradient: LOSSES.append(float(gradient.norm())))


class InTensor(Keeps):
    where = "SUM of"

    def keep(self, loss: float, batch_idx: int) -> None:
        SUM.add_(loss)

    def kept(self) -> list[float]:
        return SUM.tolist()


class InClass(Keeps):
    where, total = "InClass.total", 0.0

    def keep(self, loss: float, batch_idx: int) -> None:
        type(self).total += loss

    def kept(self) -> list[float]:
        return [self.total]


class InCallback(Keeps):
    where = "Holds.losses"

    def keep(self, loss: float, batch_idx: int) -> None:
        self.kept().append(loss)

    def kept(self) -> list[float]:
        return next(c.losses for c in self.trainer.callbacks if isinstance(c, Holds))


class InData(Keeps):
    where = "Data.losses"

    def keep(self, loss: float, batch_idx: int) -> None:
        self.trainer.datamodule.losses[batch_idx] = loss

    def kept(self) -> list[float]:
        return list(self.trainer.datamodule.losses.values())


def in_function() -> Keeps:
    losses: list[float] = []

    class InFunction(Keeps):
        where = "losses around in_function"

        def keep(self, loss: float, batch_idx: int) -> None:
            losses.append(loss)

        def kept(self) -> list[float]:
            return losses

    return InFunction()


class Caches(Keeps):
    """Caches of each process: an entry of a dict, and a value in place of None, which layers set."""

    table: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            if Caches.table is None:
                Caches.table = torch.full((4,), 1.5)
            x = layer(x) * Caches.table * SCALES.setdefault(len(x), torch.ones(()))
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


class Before(Keeps):
    """Changes it before the layers, as every stage does."""

    def forward(self, batch: Any) -> Tensor:
        LOSSES.append(float(batch[0].sum()))
        return super().forward(batch)


class Holds(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def notice(self, *arguments: Any) -> None:
        self.losses.append(arguments[-1].mean().item())


HOLDS = Holds()


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses = dict.fromkeys(range(6), 0.0)

    def train_dataloader(self) -> Any:
        data = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), 4)


KINDS = (InList, InGlobal, InTensor, InClass, InCallback, InData, in_function, Caches, Before, Later, InHook)
NAMES = [make.__name__ for make in (*KINDS, InGradient)]


def fit(name: str, strategy: Any = "auto", devices: int = 1) -> tuple[str, list[float] | str]:
    """Return where the module keeps its values, and what its hook saw, or the error."""
    global TOTAL
    for kept in (LOSSES, SCALES, HOLDS.losses):
        kept.clear()
    SUM.zero_()
    TOTAL = InClass.total = 0.0
    Caches.table = None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = globals()[name]()
    trainer = quiet_trainer(strategy, devices=devices, max_epochs=1, callbacks=[Holds()])
    try:
        trainer.fit(module, datamodule=Data())
    except HolmesError as error:
        return module.where, str(error)
    return module.where, module.found


def run(names: list[str]) -> dict[str, tuple[str, list[float] | str]]:
    return {name: fit(name, HolmesStrategy(pipeline_parallel_size=2, num_microbatches=1), 2) for name in names}


@pytest.fixture(scope="module")
def staged() -> dict[str, tuple[str, list[float] | str]]:
    """What each module gives in two stages."""
    return launch(2, "test_outside_state:run", NAMES, timeout_s=120)[0]


@pytest.mark.parametrize("name", NAMES)
def test_trials_of_a_step_leave_nothing_outside_of_the_module(name: str) -> None:
    (_, ours), (_, plain) = fit(name, HolmesStrategy()), fit(name)
    assert plain and ours == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_other_ranks_would_not_see_is_refused(name: str, staged: dict[str, Any]) -> None:
    where, found = staged[name]
    if where:
        assert where in found and "keep it on the module" in found
    else:
        assert found == pytest.approx(fit(name)[1], rel=1e-6)


def test_several_microbatches_are_warned_of_and_checked() -> None:
    with pytest.warns(UserWarning, match=r"InList.training_step changes LOSSES of .* once for each microbatch"):
        _, found = fit("InList", HolmesStrategy(num_microbatches=2))
    assert len(found) == 12
    assert "LOSSES" in fit("Later", HolmesStrategy(num_microbatches=2))[1]
    with pytest.warns(UserWarning, match=r"InGradient.layers.3.0.weight has a hook on its gradient"):
        assert "LOSSES" in fit("InGradient", HolmesStrategy(num_microbatches=2))[1]
    LOSSES.clear()
    refused = check(InList(), [torch.ones(4, 4)], num_microbatches=1).refused
    assert "LOSSES" in str(refused) and LOSSES == [], "a check leaves nothing, either"


@pytest.mark.parametrize("mode", ["r", "r+", "a+", "rb"])
def test_a_file_is_given_its_place_back_and_loses_nothing(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("one\ntwo\nthree\n")
    module: Any = TanhNet()
    with path.open(mode) as module.rows:
        module.rows.seek(4)
        outside = Outside(module)
        with outside.preserved():
            outside.begin()
            assert module.rows.readline()[:3] in ("two", b"two")
            assert outside.written() == ["self.rows"]
        assert module.rows.tell() == 4
        with outside.preserved():
            next(module.rows)  # after which a text file has no place
    assert path.read_text() == "one\ntwo\nthree\n"
