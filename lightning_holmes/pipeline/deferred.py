"""A module whose parameters have no memory yet: built by ``configure_model``, or on the meta device.

This module keeps track of the tensors that are still fake, makes stand-ins for tracing, and builds the tensors that a
rank holds. tape.py builds a single tensor; stage.py decides what a stage holds.

    deferred = DeferredModule(seed, device)
    with deferred.building():
        module.configure_model()                       # no memory
    deferred.adopt(module)
    deferred.hold_places()                              # parameters without values, in objects that stay
    with deferred.stand_ins(): trace_step(module, ...)  # parameters of the right shapes in little memory
    deferred.materialise({"layers.0.weight"}, read=None)
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import placeholder
from lightning_holmes.comm.freed_memory import give_back_freed_memory
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.tape import Tape, is_fake
from lightning_holmes.torch_private import fake_mode_of, initialiser_of, registered_buffers, registered_parameters

_SMALL = 1 << 14  # parameters with at most this many elements are traced with their real values: norms, biases
_LARGE = 1 << 20  # bytes; freed memory of tensors of at least this size is given back to the system
_SHOWN = 10


def has_fake_tensors(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` has no values yet."""
    return any(is_fake(t) for t in (*module.parameters(), *module.buffers()))


class DeferredModule:
    """The fake tensors of one module.

    Args:
        seed: the seed of the initial weights, the same on all ranks.
        device: the device for tensors that were built on the meta device.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.module: nn.Module | None = None
        self._tape = Tape(seed, device)
        # by name, fake parameters and the placeholders that replace them
        self._places: dict[str, tuple[Tensor, nn.Parameter]] = {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context in which tensors are built without memory; precision and device may be changed inside, too."""
        with self._tape.recording():
            yield

    def adopt(self, module: nn.Module) -> None:
        """Adopt ``module``, and let it initialise what it holds on the meta device.

        It is initialised by ``initialize_weights`` of a Hugging Face model, ``reset_parameters`` of its submodules,
        or ``_init_weights`` of a module that contains them.

        Raises:
            UnsupportedModuleError: a DTensor was sharded before it had a value.
        """
        self.module = module
        self._blank([t for _, t in _named_tensors(module) if t.is_meta and fake_mode_of(t) is None])
        for name, tensor in _named_tensors(module):
            self._tape.name(tensor, name)
            if dtensor.is_dtensor(tensor) and not self._is_written(tensor):
                raise UnsupportedModuleError(
                    f"{name} is sharded over its tensor group, but nothing had given it a value before: make it in "
                    f"configure_model, initialise it there, and share it out then"
                )
        with self._tape.recording():
            self._initialise(module)

    def forget(self, names: set[str]) -> None:
        """Make the parameters ``names`` fake and uninitialised."""
        assert self.module is not None
        self._blank([p for n, p in self.module.named_parameters() if n in names])

    def _blank(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors that were not recorded by fake ones that can be initialised later."""
        assert self.module is not None
        with self._tape.recording():
            parts = [dtensor.local_part(t) for t in tensors]
            made = [torch.empty(t.shape, dtype=t.dtype, device=self.device if t.is_meta else t.device) for t in parts]
        _replace(self.module, [(old, _like(new, old)) for old, new in zip(tensors, made, strict=True)])

    def _initialise(self, module: nn.Module) -> None:
        for part in _outermost(module, "initialize_weights"):
            # if it was built on meta, its parameters are still as nn.Linear and the like initialise them
            tensors = [t for _, t in _named_tensors(part)]
            if tensors and all(is_fake(t) and (t.device.type == "meta" or not self._is_written(t)) for t in tensors):
                part.initialize_weights()
        for owner in module.modules():
            own = [t for t in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)) if is_fake(t)]
            if own and not all(self._is_written(t) for t in own):
                reset = initialiser_of(owner)
                if reset is not None:
                    reset()
                initialise = _initialiser(module, owner)
                if initialise is not None:
                    initialise(owner)

    def _is_written(self, tensor: Tensor) -> bool:
        return not is_fake(tensor) or self._tape.is_written(tensor)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Context in which fake parameters and buffers are real ones of the same shape, type and names. Large
        parameters are zeros that take no memory."""
        module = self.module
        assert module is not None
        fake = [(tensor, tensor) for _, tensor in _named_tensors(module) if is_fake(tensor)]
        fake += [(tensor, place) for tensor, place in self._places.values()]
        replaced = [(present, _like(self._stand_in(tensor), present)) for tensor, present in fake]
        _replace(module, replaced)
        try:
            yield
        finally:
            _replace(module, [(real, tensor) for tensor, real in replaced])

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A real tensor in place of a fake one; for a sharded tensor, in place of the part on this rank."""
        small = dtensor.local_part(tensor).numel() <= _SMALL or not isinstance(tensor, nn.Parameter)
        if small and self._is_written(tensor):
            return self._tape.realise(tensor)
        tensor = dtensor.local_part(tensor)
        if self._place(tensor).type != "cpu":
            return torch.zeros((), dtype=tensor.dtype, device=self._place(tensor)).expand(tensor.shape)
        # memory that is only read stays the kernel's page of zeros; every matrix product would copy a tensor of stride 0
        pages = mmap.mmap(-1, max(1, tensor.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)

    def hold_places(
        self, read: Callable[[Sequence[str]], Mapping[str, Tensor]] | None = None, *, overwritten: bool = False
    ) -> None:
        """Build all buffers, and replace each fake parameter by a placeholder: a parameter object that stays, and
        whose values :meth:`materialise` sets. Arguments and errors are those of :meth:`materialise`."""
        module = self.module
        assert module is not None
        buffers = {name: buffer for name, buffer in module.named_buffers() if is_fake(buffer)}
        built: list[tuple[Tensor, Tensor]] = [
            (buffers[name], _like(real, buffers[name])) for name, real in self._built(buffers, read, overwritten)
        ]
        for name, tensor in module.named_parameters():
            if is_fake(tensor):
                part = dtensor.local_part(tensor)
                like = torch.empty((), dtype=tensor.dtype, device=self._place(tensor)).expand(part.shape)
                made = _like(placeholder(like), tensor)
                assert isinstance(made, nn.Parameter)
                self._places[name] = tensor, made
                built.append((tensor, made))
        _replace(module, built)

    @property
    def places(self) -> frozenset[str]:
        """The names of the parameters that were replaced by placeholders, also of those that have values by now."""
        return frozenset(self._places)

    def materialise(
        self,
        names: set[str],
        read: Callable[[Sequence[str]], Mapping[str, Tensor]] | None = None,
        *,
        overwritten: bool = False,
    ) -> None:
        """Give the parameters ``names`` and all buffers their values; other fake parameters become placeholders.

        Args:
            read: returns values for some of the names that it is given, say from a file.
            overwritten: all values are replaced later (by a checkpoint), so none need be set.

        Raises:
            UnsupportedModuleError: nothing initialises a tensor, or ``read`` gives a value of another shape; names
                the tensors.
        """
        self.hold_places(read, overwritten=overwritten)
        wanted = {name: tensor for name, (tensor, _) in self._places.items() if name in names}
        for name, real in self._built(wanted, read, overwritten):
            dtensor.replace_local(self._places[name][1], real)

    def _built(
        self,
        fake: Mapping[str, Tensor],
        read: Callable[[Sequence[str]], Mapping[str, Tensor]] | None,
        overwritten: bool,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the real tensor of each fake one; of a sharded tensor, this rank's part."""
        given = dict(read(list(fake))) if read is not None and fake else {}
        unset = [name for name, tensor in fake.items() if name not in given and not self._is_written(tensor)]
        if unset and not overwritten:
            more = f" and {len(unset) - _SHOWN} more" if len(unset) > _SHOWN else ""
            raise UnsupportedModuleError(
                f"{type(self.module).__name__} was built without memory, and nothing gives {', '.join(unset[:_SHOWN])}{more} a "
                f"value: initialise it where it is made, or give its module reset_parameters() or _init_weights(module)"
            )
        for name, tensor in fake.items():
            if name in given:
                value = given.pop(name)
                if value.shape != tensor.shape:
                    raise UnsupportedModuleError(
                        f"{name} has shape {tuple(tensor.shape)}, but the weights given for it {tuple(value.shape)}: build the module with the sizes "
                        f"of the checkpoint, or of what read_weights reads"
                    )
                real = dtensor.local_part(dtensor.share_of(value, tensor)).to(self._place(tensor), tensor.dtype)
            elif self._is_written(tensor):
                real = self._tape.realise(tensor)
                if dtensor.is_split(tensor):  # it may be a view of the whole
                    real = real.clone()
                    if tensor.numel() * tensor.element_size() >= _LARGE:
                        give_back_freed_memory()
            else:
                real = torch.zeros(dtensor.local_part(tensor).shape, dtype=tensor.dtype, device=self._place(tensor))
            yield name, real

    def _place(self, tensor: Tensor) -> torch.device:
        """The device on which a tensor is built."""
        return self.device if tensor.device.type == "meta" else tensor.device


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    return [*module.named_parameters(), *module.named_buffers()]


def _replace(module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put the second tensor of each pair wherever ``module`` holds the first."""
    new = {id(old): tensor for old, tensor in pairs}
    for owner in module.modules():
        for values in (registered_parameters(owner), registered_buffers(owner)):
            for key, value in values.items():
                if id(value) in new:
                    values[key] = new[id(value)]  # type: ignore[assignment]


def _like(real: Tensor, tensor: Tensor) -> Tensor:
    """Make ``real`` (for a sharded tensor, this rank's part) like ``tensor``: a DTensor, a parameter, with the
    attributes set on it."""
    real = dtensor.like(real, tensor)
    if not isinstance(tensor, nn.Parameter):
        return real
    made = nn.Parameter(real, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if not key.startswith("_") and key not in _FAKE_ATTRIBUTES:
            setattr(made, key, value)
    return made


_FAKE_ATTRIBUTES = frozenset({"fake_device", "fake_mode", "constant", "real_tensor", "nonzero_memo", "item_memo"})


def _outermost(module: nn.Module, method: str) -> list[Any]:
    found: list[Any] = []
    prefixes: list[str] = []
    for name, part in module.named_modules():
        if callable(getattr(part, method, None)) and not any(name.startswith(p) for p in prefixes):
            found.append(part)
            prefixes.append(f"{name}." if name else "")
    return found


def _initialiser(module: nn.Module, part: nn.Module) -> Callable[[nn.Module], Any] | None:
    """``_init_weights`` of the innermost module that contains ``part`` and has one."""
    found = None
    for owner in module.modules():
        own = getattr(owner, "_init_weights", None)
        if callable(own) and any(child is part for child in owner.modules()):
            found = own
    return found
