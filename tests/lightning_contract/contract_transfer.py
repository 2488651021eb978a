"""Batches on their way to a step: the hooks around the transfer, their order, stages and results."""

from typing import Any

import lightning.pytorch as pl
import torch
from comparing import state_of
from contract import Run, each
from contract_models import Net, Rows, batches
from torch.utils.data import DataLoader

HOOKS = ["before", "transfer", "after"]


@each(before="on_before_batch_transfer", after="on_after_batch_transfer")
def case_a_hook_may_change_the_batch(run: Run, hook: str):
    module = Net()
    seen: list[Any] = []

    def doubles(batch: Any, dataloader_idx: int) -> Any:
        return batch * 2

    def notes(batch: Any, batch_idx: int) -> None:
        seen.append(float(batch[1, 0]))

    setattr(module, hook, doubles)
    module.on_train_batch_start = notes  # type: ignore[method-assign]
    run.fit(module, batches(2), limit_val_batches=0)
    assert [round(value, 4) for value in seen] == [0.02, 0.06]
    return state_of(module)


class Pair:
    """A batch of the user's own class, which has a ``to`` method."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.moved = rows, 0

    def to(self, device: Any, **options: Any) -> "Pair":
        self.rows = self.rows.to(device, **options)
        self.moved += 1
        return self


class TakesPairs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.rows, batch_idx)

    def split_batch(self, batch: Any, num_microbatches: int) -> Any:
        return [Pair(part) for part in batch.rows.chunk(num_microbatches)]

    def microbatch_weight(self, batch: Any) -> int:
        return len(batch.rows)


def case_a_batch_of_the_user_s_class_is_moved_by_its_own_method(run: Run):
    moved: list[int] = []

    class Notes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            moved.append(batch.moved)

    module = TakesPairs()
    loader = DataLoader(Rows(8), batch_size=2, collate_fn=lambda rows: Pair(torch.stack(rows)))
    run.fit(module, loader, callbacks=[Notes()])
    assert moved == [1] * 4
    return state_of(module)


@each(
    a_tuple=lambda rows: (rows, rows.sum(1)),
    a_dict=lambda rows: {"rows": rows, "names": ["a"] * len(rows)},
    nested=lambda rows: {"inner": [rows, {"more": (rows, None)}]},
)
def case_batches_keep_their_form(run: Run, form: Any):
    found: list[Any] = []

    class Forms(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = batch[0] if isinstance(batch, (tuple, list)) else batch.get("rows", batch.get("inner"))
            return super().training_step(rows[0] if isinstance(rows, list) else rows, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(type(batch).__name__)

    module = Forms()
    loader = DataLoader(Rows(4), batch_size=2, collate_fn=lambda rows: form(torch.stack(rows)))
    run.fit(module, loader)
    assert found == [type(form(torch.ones(1, 4))).__name__] * 2
    return state_of(module)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def train_dataloader(self) -> Any:
        return batches(2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return batch + 1


def case_a_data_module_s_hooks_take_the_place_of_the_module_s(run: Run):
    data, module = Data(), Net()
    run.trainer().fit(module, datamodule=data)
    assert data.calls == ["before", "after"] * 2
    return state_of(module)
