"""Synchronise what a step leaves on the module: lists, numbers, tensors and metrics that hooks read later.

Only the last stage runs a step to its end, so only there does ``self.losses.append(loss)`` append the loss. Before
hooks that may read such values, the rank that owns an attribute sends it to the other ranks of its pipeline.
"""

import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm.p2p import P2P
from lightning_holmes.lightning_private import set_update_count
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.torch_private import registered_buffers, tensor_version

TOPIC_STATE = 2

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic, Tensor)
_CONTAINERS = (list, tuple, dict, set, deque, OrderedDict, defaultdict)
_UNCHANGED = object()


class ModuleState:
    """Watches the plain attributes, buffers and metrics of ``pipeline``'s module.

    Call :meth:`watch` before steps run; :meth:`synchronise` then sends what has changed since. Its two halves may be
    called separately: :meth:`send` right after a step, and :meth:`receive` before anything may read the values.
    """

    def __init__(self, pipeline: PipelineModule, p2p: P2P | None, device: torch.device) -> None:
        self._pipeline = pipeline
        self._p2p = p2p
        self._device = device
        self._reserved = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | {"log", "forward"}
        self._seen: dict[tuple[str, str], Hashable] = {}
        self._sent: list[Callable[[], None]] = []
        self._awaited: list[int] = []

    def watch(self) -> None:
        """Take the current attributes and buffers as known to all ranks."""
        self.receive()
        if self._p2p is not None and self._p2p.size > 1:
            self._seen = _fingerprints(self.attributes(), self._buffers())

    def synchronise(self) -> None:
        """Bring changed attributes and all metric states to every rank of the pipeline; all of them must call."""
        self.send()
        self.receive()
        self._finish()

    def send(self) -> None:
        """Start to send the changes to the other ranks of the pipeline; all of them must call, and receive before the
        next step."""
        p2p = self._p2p
        if p2p is None or p2p.size == 1:
            return
        self.receive()
        self._finish()  # all have received what was sent before
        mine = self._changes()
        self._awaited = [rank for rank in range(p2p.size) if rank != p2p.rank]
        for rank in self._awaited:
            p2p.expect_message(rank, TOPIC_STATE)
            self._sent.append(p2p.post_message(rank, TOPIC_STATE, mine))

    def receive(self) -> None:
        """Wait for the changes that the other ranks send, if this rank has called :meth:`send`, and set them on the module."""
        p2p, awaited, self._awaited = self._p2p, self._awaited, []
        arrived: set[tuple[str, str]] = set()
        for rank in awaited:
            assert p2p is not None
            attributes, buffers, metrics = p2p.receive_message(rank, TOPIC_STATE)
            with torch.inference_mode(False):  # the values stay on the module, and hooks may change them
                self._apply(attributes, buffers, metrics)
            arrived |= attributes.keys()
        # not what has changed here meanwhile; and after all have arrived, since one object may have two names
        if arrived:
            found = self.attributes()
            self._seen |= {key: _fingerprint(found[key]) for key in arrived & found.keys()}

    def _finish(self) -> None:
        for wait in self._sent:
            wait()
        self._sent.clear()

    def attributes(self) -> dict[tuple[str, str], Any]:
        """The plain attributes of the modules that this rank owns, by module and name."""
        found = {}
        for name, module in self._pipeline.local_modules():
            if isinstance(module, Metric):
                continue
            for key, value in vars(module).items():
                if key not in self._reserved and _is_plain(value):
                    found[name, key] = value
        return found

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers whose copy on this rank is the one that counts."""
        pipeline = self._pipeline
        return {n: b for n, b in pipeline.module.named_buffers() if pipeline.owner_stage(n) in pipeline.stages}

    def _changes(self) -> tuple[dict[tuple[str, str], Any], dict[str, Tensor], dict[str, tuple[dict[str, Any], int]]]:
        """The attributes and buffers that have changed since the last call, and all metric states; they count as
        known to all ranks from now on."""
        attributes, buffers, before = self.attributes(), self._buffers(), self._seen
        self._seen = _fingerprints(attributes, buffers)
        changed = {key for key, value in self._seen.items() if before.get(key, _UNCHANGED) != value}
        attributes = {k: tree.map_tensors(_to_host, v) for k, v in attributes.items() if k in changed}
        buffers = {name: _to_host(buffer) for name, buffer in buffers.items() if ("", name) in changed}
        metrics = {}
        for name, module in self._pipeline.local_modules():
            if isinstance(module, Metric):
                metrics[name] = (tree.map_tensors(_to_host, module.metric_state), module.update_count)
        return attributes, buffers, metrics

    def _apply(
        self,
        attributes: dict[tuple[str, str], Any],
        buffers: dict[str, Tensor],
        metrics: dict[str, tuple[dict[str, Any], int]],
    ) -> None:
        module = self._pipeline.module
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            registered_buffers(module.get_submodule(path))[key] = self._to_device(buffer)
        for (name, key), value in attributes.items():
            owner = module.get_submodule(name)
            value = tree.map_tensors(self._to_device, value)
            present = vars(owner).get(key)
            if type(present) is list and type(value) is list:
                present[:] = value
            elif isinstance(present, (dict, set)) and type(present) is type(value):
                present.clear()
                present.update(value)
            else:
                setattr(owner, key, value)
        for name, (state, count) in metrics.items():
            metric = module.get_submodule(name)
            assert isinstance(metric, Metric)
            for key, value in state.items():
                setattr(metric, key, tree.map_tensors(self._to_device, value))
            set_update_count(metric, count)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return not isinstance(value, nn.Parameter)
    if type(value) in _CONTAINERS:
        if isinstance(value, dict):
            return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
        return all(_is_plain(v) for v in value)
    return False


class _Seen:
    """A tensor and its version; keeps the tensor alive, so that no other can take its identity."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._tensor, self._version = tensor, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._tensor is other._tensor and self._version == other._version

    def __hash__(self) -> int:
        return hash((id(self._tensor), self._version))


def _fingerprints(
    attributes: dict[tuple[str, str], Any], buffers: dict[str, Tensor]
) -> dict[tuple[str, str], Hashable]:
    """The fingerprints of attributes by module and name, and of buffers by their whole name."""
    found = {key: _fingerprint(value) for key, value in attributes.items()}
    return found | {("", name): _fingerprint(buffer) for name, buffer in buffers.items()}


def _fingerprint(value: Any) -> Hashable:
    """A hashable value that differs once ``value`` has changed."""
    if isinstance(value, Tensor):
        return _Seen(value, tensor_version(value))
    if isinstance(value, np.ndarray):
        return "array", value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, dict):
        return "dict", tuple((_fingerprint(k), _fingerprint(v)) for k, v in value.items())
    if isinstance(value, (list, tuple, deque, set)):
        return type(value).__name__, tuple(_fingerprint(v) for v in value)
    return type(value).__name__, repr(value) if isinstance(value, float) else value
