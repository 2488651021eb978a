"""Synchronise what a step leaves on the module: lists, numbers, tensors, objects and metrics that hooks read later.

Only the last stage runs a step to its end, so only there does ``self.losses.append(loss)`` append the loss. Before
hooks that may read such values, the rank that owns an attribute sends it to the other ranks of its pipeline. An object of
any class counts by its attributes (object_state.py).
"""

import functools
import zlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.comm.absent import bytes_of
from lightning_holmes.comm.p2p import P2P
from lightning_holmes.comm.wire import attributes_of, find_problem
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import set_update_count
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.attributes import RESERVED, name_of
from lightning_holmes.pipeline.object_state import PLAIN, Path, content, each_value, is_looked_into, is_plain, merge
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.state_watch import SMALL_BYTES, StateWatch, is_small
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.torch_private import registered_buffers, tensor_version

TOPIC_STATE = 2

_UNCHANGED = object()
Key = tuple[str, Path]
"""A module's name, and the path of a value below it; a buffer's whole name has an empty path."""
Changes = tuple[dict[Key, Any], dict[str, Tensor], dict[str, tuple[dict[str, Any], int]]]
"""Attributes, buffers, and states and update counts of metrics."""
Modules = Iterable[tuple[str, nn.Module]]


class ModuleState:
    """Watches the plain attributes, buffers and metrics of ``pipeline``'s module.

    Call :meth:`watch` before steps run; :meth:`synchronise` then sends what has changed since. Its two halves may be
    called separately: :meth:`send` right after a step, and :meth:`receive` before anything may read the values.
    """

    def __init__(self, pipeline: PipelineModule, p2p: P2P | None, device: torch.device) -> None:
        self._pipeline = pipeline
        self._p2p = p2p
        self._device = device
        self._seen: dict[Key, Hashable] = {}
        self._watch: StateWatch | None = None
        self._structure: ModuleStructure | None = None  # for which it was made
        self._sent: list[Callable[[], None]] = []
        self._awaited: list[int] = []

    def watch(self) -> None:
        """Take the current attributes and buffers as known to all ranks."""
        self.receive()
        if self._p2p is not None and self._p2p.size > 1:
            self._seen = _fingerprints(self.attributes(), self.buffers())

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
        if awaited:
            assert p2p is not None
            self._arrive((p2p.receive_message(rank, TOPIC_STATE) for rank in awaited), None)

    def _arrive(self, changes: Iterable[Changes], among: Modules | None) -> None:
        """Set what other ranks have changed; ``among``: the modules of this rank that may hold it, too."""
        arrived: set[Key] = set()
        for attributes, buffers, metrics in changes:
            with torch.inference_mode(False):  # the values stay on the module, and hooks may change them
                self._apply(attributes, buffers, metrics)
            arrived |= attributes.keys()
        # not what has changed here meanwhile; and after all have arrived, since one object may have two names
        if arrived:
            found = self.attributes(among)
            self._seen |= _fingerprints({key: value for key, value in found.items() if _is_below(key, arrived)}, {})

    def begin_step(self) -> None:
        """Note the small values that this rank owns, before a step."""
        self._before = self._own.look()

    def of_step(self) -> Changes:
        """The small values that the step has changed since :meth:`begin_step`. The last stage's rank hands them to the others (:meth:`take`),
        whose part of the next step may begin to read them."""
        changed = self._own.changed(self._before, self._own.look())
        return self._changes({name_of(*key) for key in changed}) if changed else ({}, {}, {})

    def take(self, changes: Changes) -> None:
        """Set what the last stage's step has changed; it counts as known to all ranks."""
        with torch.inference_mode(False):  # as in _arrive
            attributes, buffers, metrics = tree.map_all_tensors(Tensor.clone, changes)
        self._arrive([(attributes, buffers, metrics)], self._own.modules)

    @property
    def _own(self) -> StateWatch:
        if self._watch is None or self._structure is not self._pipeline.structure:
            self._structure = self._pipeline.structure
            self._watch = StateWatch(self._pipeline.local_modules(), _of_tensor)
        return self._watch

    def _finish(self) -> None:
        for wait in self._sent:
            wait()
        self._sent.clear()

    def attributes(self, modules: Modules | None = None) -> dict[Key, Any]:
        """The attributes of the modules that this rank owns, and of objects that they hold, by module and path."""
        found: dict[Key, Any] = {}
        seen: set[int] = set()
        for name, module in self._pipeline.local_modules() if modules is None else modules:
            if isinstance(module, Metric):
                continue
            for key, value in vars(module).items():
                if key in RESERVED:
                    continue
                if type(value) in PLAIN:
                    found[name, (key,)] = value
                else:
                    found |= {(name, path): inner for path, inner in each_value(value, (key,), seen)}
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The buffers whose copy on this rank is the one that counts."""
        pipeline = self._pipeline
        return {n: b for n, b in pipeline.module.named_buffers() if pipeline.owner_stage(n) in pipeline.stages}

    def _changes(self, keys: set[str] | None = None) -> Changes:
        """The attributes and buffers that have changed since the last call, and all metric states; they count as
        known to all ranks from now on. ``keys``: no metrics, and of these attributes and buffers only what is small and can be sent."""
        modules = list(self._pipeline.local_modules()) if keys is None else self._own.modules
        attributes, buffers, before = self.attributes(modules), self.buffers(), self._seen
        if keys is not None:
            chosen = {key: v for key, v in attributes.items() if name_of(key[0], key[1][0]) in keys}
            small = {key: v for key, v in chosen.items() if _bytes_below(v) <= SMALL_BYTES}
            attributes = {key: v for key, v in small.items() if self._unsendable(key, v) is None}
            buffers = {name: buffer for name, buffer in buffers.items() if name in keys and is_small(buffer)}
        found = _fingerprints(attributes, buffers)
        self._seen = found if keys is None else before | found
        changed = {key for key, value in found.items() if before.get(key, _UNCHANGED) != value}
        # a write through ``.data`` has no version; the trace has seen it
        writers = structure.writers if (structure := self._pipeline.structure) is not None else ()
        changed |= {(name, path) for name, path in found if name_of(name, *path) in writers}
        new = {key for key in changed if key in attributes and not is_plain(attributes[key])}
        for place, kind, problem in filter(None, (self._unsendable(key, attributes[key]) for key in new)):
            raise UnsupportedModuleError(
                f"a step has put a new object of the class {kind} on self.{place}, which cannot be brought to the ranks "
                f"of other stages: {problem}. Make the object in __init__ or setup, where every rank does, and let the step change it"
            )
        changed = {key for key in changed if key in new or not _is_below(key, new)}
        # a step's result brings plain tensors without waiting for the device
        attributes = {
            k: v if keys is not None and is_plain(v) else tree.map_all_tensors(to_host, v)
            for k, v in attributes.items()
            if k in changed
        }
        buffers = {n: b.detach() if keys is not None else to_host(b) for n, b in buffers.items() if (n, ()) in changed}
        metrics = {}
        for name, module in modules if keys is None else ():
            if isinstance(module, Metric):
                metrics[name] = (tree.map_tensors(to_host, module.metric_state), module.update_count)
        return attributes, buffers, metrics

    def _apply(
        self, attributes: dict[Key, Any], buffers: dict[str, Tensor], metrics: dict[str, tuple[dict[str, Any], int]]
    ) -> None:
        module, to_device = self._pipeline.module, functools.partial(Tensor.to, device=self._device)
        for name, buffer in buffers.items():
            owner_name, _, key = name.rpartition(".")
            registered_buffers(module.get_submodule(owner_name))[key] = to_device(buffer)
        for (name, path), value in attributes.items():
            owner: Any = module.get_submodule(name)
            for part in path[:-1]:
                owner = attributes_of(owner)[part]
            present = attributes_of(owner).get(path[-1])
            value = merge(present, tree.map_all_tensors(to_device, value))
            if value is present:
                continue
            if isinstance(owner, nn.Module):
                setattr(owner, path[-1], value)
            else:
                object.__setattr__(owner, path[-1], value)
        for name, (state, count) in metrics.items():
            metric = module.get_submodule(name)
            assert isinstance(metric, Metric)
            for key, value in state.items():
                setattr(metric, key, tree.map_tensors(to_device, value))
            set_update_count(metric, count)

    def _unsendable(self, key: Key, value: Any) -> tuple[str, str, str] | None:
        """The place and class of an object that no other rank could be given, and why; None if there is none."""
        for path, inner in each_value(value, key[1], set()):
            if is_looked_into(inner) and (problem := find_problem(type(inner))):
                return name_of(key[0], *path), type(inner).__qualname__, problem
        return None


def to_host(tensor: Tensor) -> Tensor:
    """The values of a tensor in the host's memory, without autograd."""
    return tensor.detach().cpu()


def _bytes_below(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tree.named_tensors(value, ""))


def _is_below(key: Key, others: set[Key]) -> bool:
    """Whether ``key`` is one of ``others``, or the path of a value below one."""
    name, path = key
    return any((name, path[:length]) in others for length in range(len(path) + 1))


class _Seen:
    """A tensor and its version, or an object; keeps it alive, so that no other can take its identity."""

    def __init__(self, value: Any, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._value is other._value and self._version == other._version

    def __hash__(self) -> int:
        return hash((id(self._value), self._version))


def _fingerprints(attributes: dict[Key, Any], buffers: dict[str, Tensor]) -> dict[Key, Hashable]:
    """Hashable values that differ once a value has changed: of attributes by module and path, of buffers by their whole name."""
    # the attributes of an object have keys of their own
    found: dict[Key, Hashable] = {
        key: _Seen(value) if is_looked_into(value) else content(value, _of_tensor) for key, value in attributes.items()
    }
    return found | {(name, ()): _of_tensor(buffer) for name, buffer in buffers.items()}


def _of_tensor(tensor: Tensor) -> Hashable:
    """Describe a tensor, with its values where comparing them costs next to nothing."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized
    values = zlib.crc32(bytes_of(tensor).numpy().data) if plain and is_small(tensor) else 0
    return _Seen(tensor, tensor_version(tensor)), values
