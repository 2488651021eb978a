"""Where gradients gather: one flat ``main_grad`` for each device and gradient type of a rank.

Lightning erases ``p.grad`` between a training step and the backward that it thinks follows; here the
backward is part of the step, so gradients live in buffers of our own until :meth:`GradBuffer.expose`.

Parameters whose gradient has the buffer's type accumulate straight into views of it; others (bf16
parameters, sharded ones) are added by a hook behind each accumulation, in fp32. Of a parameter that is sharded
over a tensor group the buffer has this rank's part; its gradients are laid out like the parameter before they
enter. Behind the gradients a buffer has one
number for each parameter: whether anything reached it. It is summed with them, so that a parameter which no
replica used keeps ``grad = None`` as in plain Lightning (AdamW would decay it otherwise).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_holmes.comm import sharded


class GradBuffer:
    """Gradients of ``parameters`` (name -> parameter of this rank) over one accumulation window.

    Args:
        flat: keep one flat buffer for reductions. Without it (a rank on its own, no sharded parameters), gradients
            stay the tensors that autograd made, which costs neither memory nor time.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, flat: bool) -> None:
        self.parameters = dict(parameters)
        self.flat = flat
        self.buffers: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trainable: tuple[str, ...] = ()
        self._flags: list[tuple[Tensor, list[str]]] = []
        self._touched: set[str] = set()
        self._open = False

    def begin(self) -> None:
        """Start a batch: zero the buffer if a new window begins, and let autograd accumulate into it."""
        trainable = tuple(n for n, p in self.parameters.items() if p.requires_grad)
        if not self.flat:
            for name in self.parameters:
                self.parameters[name].grad = self._kept.get(name) if self._open else None
            self._open = True
            return
        if trainable != self._trainable:
            self._build(trainable)
        elif not self._open:
            for buffer in self.buffers:
                buffer.zero_()
            self._touched.clear()
        self._open = True
        for name, view in self._views.items():
            parameter = self.parameters[name]
            parameter.grad = view if _accumulates_in(view, parameter) else None

    def end(self) -> None:
        """Finish a batch: take the gradients off the parameters, out of reach of ``zero_grad``."""
        for name, parameter in self.parameters.items():
            if not self.flat:
                if parameter.grad is not None:
                    self._kept[name] = parameter.grad
                else:
                    self._kept.pop(name, None)
            parameter.grad = None

    def seal(self) -> None:
        """Write down which parameters were reached, before a reduction sums that too."""
        for flags, names in self._flags:
            flags.copy_(torch.tensor([float(n in self._touched) for n in names], dtype=flags.dtype))

    def expose(self, *, last: bool) -> None:
        """Make the gathered gradients ``p.grad``; ``last`` closes the window, after :meth:`seal` and reductions."""
        for name, gradient in self._kept.items():
            self.parameters[name].grad = gradient
        reached = self._touched
        if last:
            reached = {n for flags, names in self._flags for n, f in zip(names, flags.tolist(), strict=True) if f}
        for name, view in self._views.items():
            parameter = self.parameters[name]
            if name in reached:
                gradient = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
                parameter.grad = sharded.like(gradient, parameter)
            else:
                parameter.grad = None
        if last:
            self._open = False
            self._kept = {}

    def flag(self, name: str) -> Tensor | None:
        """The one-element view that says whether ``name`` was reached, after :meth:`seal`."""
        for flags, names in self._flags:
            if name in names:
                index = names.index(name)
                return flags[index : index + 1]
        return None

    def gradient(self, name: str) -> Tensor | None:
        """The gathered gradient of ``name``, or None if it has none."""
        return self._views.get(name) if self.flat else self._kept.get(name)

    def close(self) -> None:
        """Let go of buffers and hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buffers.clear()
        self._views.clear()
        self._flags.clear()
        self._kept.clear()
        self._open = False

    def _build(self, trainable: tuple[str, ...]) -> None:
        """Lay out the buffers for the parameters that are trained now; keeps what has been gathered."""
        gathered = {n: v for n, v in self._views.items() if self._open}
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._views, self.buffers, self._flags = {}, [], []
        self._trainable = trainable
        layouts: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in trainable:
            parameter = self.parameters[name]
            dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
            layouts.setdefault((parameter.device, dtype), []).append(name)
        for (device, dtype), names in layouts.items():
            total = sum(sharded.local_part(self.parameters[n]).numel() for n in names)
            buffer = torch.zeros(total + len(names), dtype=dtype, device=device)
            self.buffers.append(buffer)
            self._flags.append((buffer[total:], names))
            start = 0
            for name in names:
                parameter = self.parameters[name]
                local = sharded.local_part(parameter)
                view = buffer[start : start + local.numel()].view(local.shape)
                start += local.numel()
                self._views[name] = view
                if name in gathered:
                    view.copy_(gathered[name])
                hook = parameter.register_post_accumulate_grad_hook(self._hook(name, view))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _hook(self, name: str, view: Tensor) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            self._touched.add(name)
            if not _accumulates_in(view, parameter):
                assert parameter.grad is not None
                view.add_(sharded.gradient_part(parameter.grad, parameter))
                parameter.grad = None

        return arrived


def _accumulates_in(view: Tensor, parameter: Tensor) -> bool:
    """Whether autograd can add a parameter's gradients to its view by itself."""
    return view.dtype == parameter.dtype and not sharded.is_sharded(parameter)
