"""The private behaviour on which torch_private.py relies; a failure here means that torch has changed it."""

import math
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from lightning_holmes import torch_private

pytestmark = pytest.mark.versions


class Recorder(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Records the names of operators and their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        written = list(torch_private.written_arguments(func, args, kwargs))
        self.seen.append((torch_private.operator_name(func), written))
        return func(*args, **kwargs)


def test_a_dispatch_mode_sees_operators_by_name_and_what_they_write() -> None:
    x, y, out = torch.ones(3), torch.ones(3), torch.empty(3)
    with Recorder() as recorder:
        z = x + y
        x.mul_(2)
        torch.add(x, y, out=out)
        torch._foreach_add_([x, y], 1.0)
    names = [name for name, _ in recorder.seen]
    assert names == ["aten::add", "aten::mul_", "aten::add", "aten::_foreach_add_"]
    assert recorder.seen[0][1] == [] and z.sum() == 6
    assert recorder.seen[1][1][0] is x
    assert recorder.seen[2][1][0] is out
    assert recorder.seen[3][1][0][0] is x


def test_a_dispatch_mode_sees_values_becoming_python_numbers() -> None:
    with Recorder() as recorder:
        assert torch.ones(1).item() == 1.0
        assert bool(torch.ones(1) > 0)
    assert [n for n, _ in recorder.seen].count("aten::_local_scalar_dense") == 2


def test_the_default_store_keeps_values(alone: None) -> None:
    store = torch_private.default_store()
    store.set("holmes/test", "value")
    assert store.check(["holmes/test"]) and store.get("holmes/test") == b"value"


def test_the_part_of_a_dtensor_is_found_and_replaced_and_collectives_tell_their_ranks(alone: None) -> None:
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    class Ranks(torch_private.TorchDispatchMode):  # type: ignore[misc]
        seen: list[list[int] | None] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "_c10d_functional":
                self.seen.append(torch_private.collective_ranks(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0]), [Shard(0)]))
    local = torch.full((4, 2), 3.0)
    torch_private.set_local_tensor(weight, local)
    assert torch_private.local_tensor(weight) is local and float((weight.detach() * 2).full_tensor().sum()) == 48
    with Ranks() as mode:
        result = collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        filled = torch_private.async_value(result)
        assert torch.equal(result + 0, torch.ones(2))
    assert type(filled) is torch.Tensor and torch_private.async_value(local) is local
    assert mode.seen[0] == [0] and mode.seen[1:] in ([], [None])


def test_batch_norms_and_dropouts_are_told_from_other_layers() -> None:
    assert torch_private.is_batch_norm(nn.BatchNorm2d(3)) and torch_private.is_batch_norm(nn.SyncBatchNorm(3))
    assert not torch_private.is_batch_norm(nn.LayerNorm(3)) and not torch_private.is_batch_norm(nn.GroupNorm(1, 3))
    assert torch_private.is_dropout(nn.Dropout()) and torch_private.is_dropout(nn.Dropout2d())
    assert not torch_private.is_dropout(nn.ReLU())


def test_hooks_behind_an_accumulation_are_known() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hook(parameter)
    parameter.register_hook(lambda gradient: None)
    assert torch_private.has_gradient_hook(parameter) and not torch_private.has_accumulation_hook(parameter)
    hook = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert torch_private.has_accumulation_hook(parameter)
    hook.remove()
    assert not torch_private.has_accumulation_hook(parameter)


def test_hooks_on_the_gradients_of_a_module_are_known() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    assert not torch_private.has_backward_hook(layer)
    hook = layer.register_full_backward_hook(lambda *_: None)
    assert torch_private.has_backward_hook(layer)
    hook.remove()
    assert not torch_private.has_backward_hook(layer)


def test_versions_grow_with_changes_in_place() -> None:
    x = torch.ones(3)
    before = torch_private.tensor_version(x)
    x.add_(1)
    assert torch_private.tensor_version(x) > before
    with torch.inference_mode():
        torch_private.tensor_version(torch.ones(3))


def test_gloo_groups_are_made_on_a_device_of_ones_choice(tmp_path) -> None:  # type: ignore[no-untyped-def]
    device = torch_private.gloo_device("lo")
    store = dist.FileStore(f"{tmp_path}/store", 1)
    for name in ("first", "second"):  # on the same device
        group = torch_private.gloo_group(
            dist.PrefixStore(name, store), 0, 1, [device], timedelta(seconds=20), connect=timedelta(seconds=5)
        )
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0, 1.0]
    assert group.options._timeout == timedelta(seconds=20)
    assert not torch_private.is_backend_registered("no_such_backend")


def test_gloo_has_no_ibverbs() -> None:
    """If this fails, torch supports it: let gloo groups on an RDMA fabric use it (comm/gloo.py), where the device
    opens."""
    program = "from lightning_holmes import torch_private; torch_private.gloo_device('lo')"
    asked = subprocess.run(  # gloo reads the variable once per process
        [sys.executable, "-c", program],
        env={**os.environ, "GLOO_DEVICE_TRANSPORT": "IBVERBS"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "unsupported gloo device" in asked.stderr and asked.returncode, asked


def test_gloos_default_device_does_not_read_the_interface_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is why the user's interfaces are passed to it by name (comm/group_transports.py)."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert torch_private.gloo_device(None) is not None


def test_fake_tensors_know_their_mode_and_fused_attention_is_counted() -> None:
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        heads = nn.Parameter(torch.empty(2, 3, 5, 4))
        with FlopCounterMode(display=False, custom_mapping=torch_private.attention_flop_formulas()) as counter:
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            assert counter.get_total_flops() == 2 * (2 * 2 * 3 * 5 * 5 * 4)
            mixed.sum().backward()
    assert counter.get_total_flops() == 7 * (2 * 2 * 3 * 5 * 5 * 4)
    assert torch_private.fake_mode_of(heads) is mode
    assert torch_private.fake_mode_of(torch.ones(2)) is None


def test_what_a_fake_mode_has_converted_can_be_forgotten() -> None:
    mode, real = torch_private.FakeTensorMode(allow_non_fake_inputs=True), torch.ones(3)
    first = mode.from_tensor(real)
    assert mode.from_tensor(real) is first
    torch_private.forget_conversions(mode)
    assert mode.from_tensor(real) is not first


def test_without_modes_no_fake_tensor_mode_acts() -> None:
    with torch_private.FakeTensorMode():
        assert torch_private.fake_mode_of(torch.ones(1)) is not None
        with torch_private.without_modes():
            assert torch_private.fake_mode_of(torch.ones(1)) is None
        assert torch_private.fake_mode_of(torch.ones(1)) is not None


def test_a_node_of_autograd_tells_by_what_its_operator_divides_and_whether_it_gives_one_number() -> None:
    x, y = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, -100, 2])
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    rows = x.sum(1)
    divisors = {
        3.0: nn.functional.cross_entropy(x, y),
        12.0: x.mean(),
        4.0: nn.functional.mse_loss(rows, mask),
        2.0: (rows * mask).sum() / mask.sum(),
        7.0: rows.sum() / 7,
        5.0: rows.sum() / torch.tensor(5),
    }
    for divisor, loss in divisors.items():
        assert float(torch_private.divisor_of(loss.grad_fn)) == divisor  # type: ignore[arg-type]
        assert torch_private.gives_one_number(loss.grad_fn)
    for value in (rows, rows.sum(), rows / rows.detach(), nn.functional.cross_entropy(x, y, reduction="sum")):
        assert torch_private.divisor_of(value.grad_fn) is None
    assert not torch_private.gives_one_number(rows.grad_fn)


def test_operators_that_compute_are_told_from_views() -> None:
    ops = torch.ops.aten
    assert not any(map(torch_private.computes, (ops.view.default, ops.t.default, ops.detach.default, ops.split.Tensor)))
    assert not torch_private.computes(torch.ops.prim.device.default)
    assert all(map(torch_private.computes, (ops.mm.default, ops.add.Tensor, ops.add_.Tensor, ops.clone.default)))


def test_lists_of_tensors_are_changed_in_place_like_each_of_them() -> None:
    made = [torch.randn(3, 2), torch.randn(5, dtype=torch.bfloat16), torch.tensor([math.nan, -4.0])]
    multiplied, clamped = [t.clone() for t in made], [t.clone() for t in made]
    torch_private.multiply_all(multiplied, torch.tensor(0.3))
    torch_private.clamp_all(clamped, 0.5)
    for tensor, one, other in zip(made, multiplied, clamped, strict=True):
        torch.testing.assert_close(one, tensor * torch.tensor(0.3), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(other, tensor.clamp(-0.5, 0.5), rtol=0, atol=0, equal_nan=True)
    torch_private.multiply_all([], torch.tensor(1.0))


def test_a_profiler_is_noticed_and_records_all_threads() -> None:
    def work() -> None:
        with record_function("in a thread"):
            torch.ones(2).sum()

    assert not torch_private.is_profiling()
    with profile(experimental_config=torch_private.profiling_all_threads()) as profiler:
        assert torch_private.is_profiling()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "in a thread" in [event.name for event in profiler.events()] and not torch_private.is_profiling()


def test_compiled_modules_are_known_and_tensor_classes_can_be_left_out() -> None:
    compiled = nn.Linear(2, 2)
    assert not torch_private.is_compiled(compiled)
    compiled.compile()
    assert torch_private.is_compiled(compiled) and torch_private.is_compiled(torch.compile(nn.Linear(2, 2)))

    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return "told"

    tensor = torch.ones(2).as_subclass(Told)
    assert torch.sum(tensor) == "told"
    with torch_private.without_torch_functions():
        assert float(torch.sum(tensor)) == 2.0


def test_a_backward_pass_is_known_in_its_thread_only() -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: found.append(torch_private.is_in_backward()))
    x.sum().backward()
    assert found == [True] and not torch_private.is_in_backward()


def test_activation_checkpointing_of_both_kinds_is_noticed_and_works_as_before() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, noticed = nn.Linear(3, 3), []
    x = torch.ones(2, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    for reentrant in (True, False):
        with torch_private.noticing_checkpoints(lambda: noticed.append(1)):
            y = checkpoint(layer, x, use_reentrant=reentrant)
        x.grad = None
        y.sum().backward()
        assert torch.equal(x.grad, expected)
    assert len(noticed) == 2
    checkpoint(layer, x, use_reentrant=False)
    assert len(noticed) == 2


def test_what_is_registered_with_a_module_is_found_and_exchanged() -> None:
    class Registered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.register_parameter("none", None)
            self.weight, self.first = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
            self.second, self.plain = self.first, torch.ones(1)

    module = Registered()
    assert set(torch_private.MODULE_REGISTRIES) < set(vars(module)) and "plain" in vars(module)
    torch_private.registered_parameters(module)["weight"] = replaced = nn.Parameter(torch.zeros(1))
    torch_private.registered_buffers(module)["seen"] = torch.ones(1)
    assert module.weight is replaced and float(module.seen) == 1.0
    assert list(torch_private.registered_parameters(module)) == ["none", "weight"]
    assert list(torch_private.registered_modules(module)) == ["first", "second"]
    assert not torch_private.has_load_hooks(module)
    module.register_load_state_dict_pre_hook(lambda *args: None)
    assert torch_private.has_load_hooks(module)


def test_modules_tell_how_they_are_initialised_and_moved() -> None:
    assert torch_private.initialiser_of(nn.ReLU()) is None
    for module in (nn.Linear(2, 2), nn.MultiheadAttention(4, 2)):
        initialise = torch_private.initialiser_of(module)
        assert initialise is not None
        weight = next(p for p in module.parameters() if p.ndim == 2)
        weight.data.zero_()
        initialise()
        assert weight.abs().sum() > 0

    class Moved(nn.Module):
        moved = 0

        def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
            self.moved += 1
            return super()._apply(fn, recurse)

    module = Moved()
    module.to(torch.float64).half().to_empty(device="cpu")
    assert module.moved == 3, "models/hf.py builds itself before it is moved"


def test_optimizers_keep_hooks_in_attributes_that_say_so() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    hook = optimizer.register_step_post_hook(lambda *args: None)
    keeping = [name for name, value in vars(optimizer).items() if torch_private.holds_hooks(name) and value]
    assert keeping == ["_optimizer_step_post_hooks"] and hook.id in vars(optimizer)[keeping[0]]
    assert not any(map(torch_private.holds_hooks, ("state", "param_groups", "defaults")))


def test_hooks_of_a_step_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not torch_private.step_hooks(optimizer)
    registers = (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
    for register in registers:

        def hook(*_: object) -> None: ...

        handle = register(hook)
        assert torch_private.step_hooks(optimizer) == [hook]
        handle.remove()


def test_operators_name_their_arguments() -> None:
    assert torch_private.argument_names(torch.ops.aten.empty_like.default) >= {"self", "dtype", "device"}


def test_all_groups_can_be_aborted(tmp_path) -> None:  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch_private.abort_groups()
    assert not dist.is_initialized()


def test_nccl_groups_take_the_network_module_by_name() -> None:
    if not dist.is_nccl_available():
        assert not hasattr(dist, "ProcessGroupNCCL")  # this torch is built without it: no group asks for it
        return
    assert torch_private.nccl_options("Socket").config.net_name == "Socket"


def test_code_that_may_not_be_compiled_whole_is_told_from_other_errors() -> None:
    @torch.compiler.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(Exception, match=r"torch\.compiler\.disable") as raised:
        torch.compile(lambda x: apart(x) * 2, fullgraph=True, backend="eager")(torch.ones(1))
    assert torch_private.is_broken_graph(raised.value)
    assert not torch_private.is_broken_graph(RuntimeError("torch.compiler.disable"))


def test_chosen_tensors_are_sharded_without_sending_and_nothing_is_written_on_them(alone: None) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sent(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func.namespace in ("c10d", "_c10d_functional")
            return func(*args, **(kwargs or {}))

    mesh, whole = DeviceMesh("cpu", [0]), torch.arange(4.0)
    sent = []
    for chosen in (lambda tensor: False, lambda tensor: tensor.data_ptr() == whole.data_ptr()):
        for placement in (Shard(0), Replicate()):
            with torch_private.sharded_locally(chosen), Sent() as counted:
                split = distribute_tensor(whole, mesh, [placement])
            assert vars(split) == {} and set(vars(nn.Parameter(split))) <= {"_is_param"}  # elementwise copies it
            assert torch_private.local_tensor(split).tolist() == whole.tolist()
            sent.append(counted.count)
    assert sent[0] and sent[1] and sent[2:] == [0, 0]


def test_the_parts_of_a_sparse_tensor_are_as_they_were_given() -> None:
    indices, values = torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0])
    tensor = torch.sparse_coo_tensor(indices, values, (2,))
    found = torch_private.sparse_parts(tensor)
    assert torch.equal(found[0], indices) and torch.equal(found[1], values) and not tensor.is_coalesced()


def test_classes_of_tensors_are_passed_over_where_that_is_said() -> None:
    seen: list[str] = []

    class Seen(torch.Tensor):
        __torch_function__ = torch_private.without_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(torch_private.operator_name(func))
            with torch_private.without_torch_dispatch():
                return func(*args, **(kwargs or {}))

    tensor = torch.ones(2).as_subclass(Seen)
    assert type(tensor + 1) is torch.Tensor and seen == ["aten::add"]
    with torch_private.without_torch_dispatch():
        assert (tensor * 2).sum() == 4
    assert seen == ["aten::add"]
