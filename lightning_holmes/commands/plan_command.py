"""`lightning-holmes plan`: predicts the time and memory of a run before it is started, from the config files of fit.

It combines the profile of the model (without its weights), topology, devices and search, and prints the result. The
command line itself is in cli.py.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_holmes.checking.first_step import attached
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.commands.plan_devices import (
    KINDS,
    asks_for_here,
    devices_per_host,
    find_devices,
    precision_of,
    probe_here,
)
from lightning_holmes.errors import ConfigurationError, UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.profile import ReadsValuesError, build_fake, profile_step
from lightning_holmes.plan.asked import Asked, AskedSharding
from lightning_holmes.plan.collective_choice import Sharding
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.placement import choose_pipeline_size, make_placement
from lightning_holmes.plan.plan import WHOLE_MODULE, Plan
from lightning_holmes.plan.planner import Known, can_split, complete, plan_of_prediction
from lightning_holmes.plan.route import REACHED, Network
from lightning_holmes.plan.saved_plan import check_plan, place_again
from lightning_holmes.plan.search import SearchResult, SearchSpace, search_with_sharding
from lightning_holmes.plan.search.candidates import space_of
from lightning_holmes.plan.tables import print_search, search_data
from lightning_holmes.plan.timeline_plot import PLOT_FORMATS, save_timeline_plot
from lightning_holmes.plan.training import make_training
from lightning_holmes.strategy import HolmesStrategy
from lightning_holmes.strategy.admission import check_module
from lightning_holmes.strategy.profiling import LARGEST_RUN
from lightning_holmes.strategy.samples import step_arguments

# types of weights that are not in fp32; bf16 stands for fp16, which has as many bytes
_WEIGHTS = {"bf16-true": torch.bfloat16, "16-true": torch.bfloat16, "64-true": torch.float64}
_HALF_BYTES = 2.0
_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
_DTYPES |= {"long": torch.int64, "int32": torch.int32, "float16": torch.float16, "bool": torch.bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The command's own options; cli.py documents them."""

    topology: str | None = None
    device_type: str | None = None
    batch_shape: str | None = None
    batch_samples: int | None = None
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    sharding: AskedSharding | None = None
    sequence_parallel: bool = False
    plot: str | None = None
    output: str | None = None
    format: Literal["table", "json"] = "table"


def run_plan(
    request: PlanRequest,
    *,
    build_model: Callable[[], pl.LightningModule],
    load_batch: Callable[[pl.LightningModule], Any] | None,
    strategy: Any,
    trainer: Mapping[str, Any],
) -> SearchResult:
    """Profile, search, print and write. For the arguments see make_cost_model."""
    given = strategy_settings(strategy)
    if request.sharding is not None:
        given["sharding"] = request.sharding
    holmes = _strategy(request, given)
    asked = holmes.asked
    cost_model = make_cost_model(request, given, build_model=build_model, load_batch=load_batch, trainer=trainer)
    if (plan := holmes.given_plan) is not None:  # refuse a plan file that fit would refuse
        topology, model, is_whole = cost_model.network.topology, cost_model.model, plan.layers == WHOLE_MODULE
        check_plan(
            plan,
            topology=topology,
            placement=place_again(plan, topology, topology.num_devices),
            layers=None if is_whole else model.layer_list,
            num_layers=None if is_whole else model.num_layers,
            source=f"the plan in {given['plan']}",
        )
    space = _space(request, asked, is_plan="plan" in given, model=cost_model.model)
    result = search_with_sharding(cost_model, space, asked.sharding)
    if request.output is not None:
        make_best_plan(result, cost_model, asked, sockets=asks_for_here(request.device_type)).save(request.output)
    if request.format == "json":
        print(json.dumps(search_data(result, cost_model), indent=1, allow_nan=False))
    else:
        print_search(result, cost_model)
        if request.output is not None:
            print(f"written: {request.output}, for HolmesStrategy(plan={request.output!r})")
    if request.plot is not None:
        save_timeline_plot([result.best.timeline], request.plot, title=f"{cost_model.model.name}: {result.best.run}")
    return result


def make_cost_model(
    request: PlanRequest,
    given: Mapping[str, Any],
    *,
    build_model: Callable[[], pl.LightningModule],
    load_batch: Callable[[pl.LightningModule], Any] | None,
    trainer: Mapping[str, Any],
) -> CostModel:
    """Make the cost model of a step, for all plans of the search.

    Args:
        given: the strategy's arguments (strategy_settings).
        build_model: makes the module; called in a context in which parameters take no memory, unless the step reads values.
        load_batch: returns a training batch of one replica; None if there is no data.
        trainer: the other trainer settings; num_nodes, devices, precision and plugins are read.
    """
    asked = _strategy(request, given).asked
    topology = _topology(request, given, trainer)
    precision = precision_of(trainer)
    dtype = _WEIGHTS.get(precision, torch.float32)

    def whole() -> pl.LightningModule:
        module = configured(build_model())
        if precision in _WEIGHTS:
            _cast(module, dtype)
        return module

    with _default_dtype(dtype):  # like Lightning's precision plugin, which also converts tensors of other types
        try:
            model = build_fake(whole)
        except ConfigurationError:
            raise
        except Exception:  # then with weights (from_pretrained)
            model = whole()
    check_module(model, fitting=True, is_pipeline=False)  # refuse modules that no layout supports

    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)  # half as many bytes with both types

    def profiled(module: pl.LightningModule) -> tuple[ModelCost, int]:
        """The module's costs, and the number of samples of its batch."""
        batch = _batch(request, module, load_batch)
        batch = tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        samples = BatchSplitter().batch_size(batch)
        small = BatchSplitter().split(batch, samples)[0]
        with attached(module):
            cost = profile_step(
                module,
                (small, *step_arguments(module, "training_step")),
                layers=asked.layers,
                context=autocast if precision in ("bf16-mixed", "16-mixed") else None,
                operator_s=0.0 if here is None else here.operator_s,
                may_run=_size(module) <= LARGEST_RUN,
            )
        return cost, samples

    here = probe_here(KINDS[precision]) if asks_for_here(request.device_type) else None
    with _default_dtype(dtype):
        try:
            cost, samples = profiled(model)
        except ReadsValuesError as error:  # then the module is run once with real values, as in a run
            if _size(model) > LARGEST_RUN:
                raise UnsupportedModuleError(
                    f"{error}. It has {_size(model):,} parameters, and only modules of up to {LARGEST_RUN:,} are run for real here"
                ) from error
            cost, samples = profiled(whole())
    devices = find_devices(request.device_type, topology, here)
    kind = "half" if cost.parameter_itemsize <= _HALF_BYTES else KINDS[precision]
    devices = tuple(device.at(kind) for device in devices)
    network = Network.of_devices(topology, devices, efficiency=REACHED)
    batch_samples = request.batch_samples
    if batch_samples is None:  # as in fit: the loader's samples for each replica of the configured layout
        size, tensor = asked.pipeline_parallel_size, asked.tensor_parallel_size
        size = choose_pipeline_size(topology, tensor)[0] if size == "auto" else size
        batch_samples = samples * max(1, topology.num_devices // (size * tensor))
    training = make_training(
        asked,
        cost,
        batch_samples=batch_samples,
        device="cuda" if here is None else "cpu",
        update_s_per_byte=max(device.update_s_per_byte for device in devices),
        operator_s=0.0 if here is None else here.operator_s,
    )
    training = replace(training, sequence_parallel=request.sequence_parallel)
    return CostModel(cost, network, devices=devices, training=training)


def strategy_settings(strategy: Any) -> dict[str, Any]:
    """HolmesStrategy's arguments in a trainer's strategy setting, without arguments that have their default values."""
    if strategy in (None, "auto", "holmes"):
        return {}
    named = strategy if isinstance(strategy, str) else strategy.get("class_path")
    if isinstance(strategy, str) or str(named).rpartition(".")[2] != "HolmesStrategy":
        raise ConfigurationError(
            f"trainer.strategy is {named!r}: plan predicts runs of HolmesStrategy; use "
            "strategy: holmes, or class_path: lightning_holmes.HolmesStrategy"
        )
    defaults = inspect.signature(HolmesStrategy.__init__).parameters
    given = dict(strategy.get("init_args") or {})
    return {name: value for name, value in given.items() if name in defaults and value != defaults[name].default}


def _size(module: pl.LightningModule) -> int:
    return sum(p.numel() for p in module.parameters())


def parse_batch_shape(text: str) -> Any:
    """Make a batch of zeros from shapes such as "4x3x224x224" or "input_ids=4x2048:int64,labels=4x2048:int64".

    The first number of a shape is the number of samples. Without a type, a tensor is float32.
    """
    parts = text.split(",")
    if len(parts) == 1 and "=" not in text:
        return _empty(text, text)
    batch = {}
    for part in parts:
        name, equals, shape = part.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(f"batch_shape={text!r}: {part!r} has no name; write name=4x2048:int64")
        batch[name.strip()] = _empty(shape, text)
    return batch


def _empty(shape: str, text: str) -> torch.Tensor:
    sizes, _, dtype = shape.strip().partition(":")
    try:
        numbers = [int(size) for size in sizes.split("x")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or (dtype or "float32") not in _DTYPES:
        raise ConfigurationError(
            f"batch_shape={text!r}: {shape!r} is not a shape; write whole numbers of at least 1 and, if need be, a type: "
            f"4x2048:int64 (types: {', '.join(_DTYPES)})"
        )
    return torch.zeros(numbers, dtype=_DTYPES[dtype or "float32"])


def _cast(module: pl.LightningModule, dtype: torch.dtype) -> None:
    """Convert floating-point parameters and buffers to this type, also tensors without values, which ``Module.to`` cannot convert."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if isinstance(tensor, nn.Parameter):
                new = made.setdefault(id(tensor), nn.Parameter(tensor.detach().to(dtype), tensor.requires_grad))
                setattr(owner, name, new)
            else:
                setattr(owner, name, tensor.to(dtype))


def configured(model: pl.LightningModule) -> pl.LightningModule:
    """Call the module's setup and configure_model, as a trainer does, and return the module. A setup that fails is left out with a warning.

    Raises:
        UnsupportedModuleError: configure_model needs the device mesh of a run.
    """
    if pl.utilities.model_helpers.is_overridden("setup", model):
        with attached(model):
            try:
                model.setup("fit")
            except Exception as error:
                pl.utilities.rank_zero_warn(
                    f"{type(model).__name__}.setup does not run without a run ({type(error).__name__}: {error}), and is left out: "
                    f"where it builds layers, plan with what a run prints, or build them in configure_model"
                )
    try:
        model.configure_model()
    except (AttributeError, TypeError) as error:
        code = getattr(type(model).configure_model, "__code__", None)
        if "NoneType" not in str(error) or code is None or "device_mesh" not in code.co_names:
            raise
        name = type(model).__name__
        raise UnsupportedModuleError(
            f"{name}.configure_model does not run where self.device_mesh is None ({error}); here there are no ranks, and "
            "the whole module is planned with: have it share its layers out only if self.device_mesh is not None"
        ) from error
    return model


def _batch(
    request: PlanRequest, model: pl.LightningModule, load_batch: Callable[[pl.LightningModule], Any] | None
) -> Any:
    if request.batch_shape is not None:
        return parse_batch_shape(request.batch_shape)
    if load_batch is not None:
        return load_batch(model)
    if model.example_input_array is not None:
        return model.example_input_array
    raise ConfigurationError(
        f"there is no batch to plan with: give a data module, {type(model).__name__}.example_input_array, or "
        "--batch_shape, for example --batch_shape input_ids=4x2048:int64,labels=4x2048:int64"
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _topology(request: PlanRequest, given: Mapping[str, Any], trainer: Mapping[str, Any]) -> Topology:
    found = request.topology or given.get("topology", "auto")
    if isinstance(found, Topology):
        return found
    if found != "auto":
        return Topology.from_yaml(found)
    num_nodes = trainer.get("num_nodes")
    if num_nodes not in (None, 1):
        cluster = f"{{name: all, hosts: [{{name: h, count: {num_nodes}, devices: 8, nics: [{{name: ib0, kind: infiniband, bandwidth: 200 Gbit/s}}]}}]}}"
        raise ConfigurationError(
            f"trainer.num_nodes={num_nodes!r}: which network joins the hosts is not known; write a file, such as clusters: [{cluster}], "
            "and give it as --topology FILE"
            if num_nodes > 1
            else f"trainer.num_nodes={num_nodes!r} is not allowed; write a number of at least 1"
        )
    return Topology.single_cluster(num_hosts=1, devices_per_host=devices_per_host(request.device_type, trainer))


def _strategy(request: PlanRequest, given: Mapping[str, Any]) -> HolmesStrategy:
    """Make a strategy, which checks its arguments, with those that affect a prediction: those of Asked, the plan file, and the topology, which may
    have optimizer nodes."""
    names = {entry.name for entry in fields(Asked)} | {"plan", "topology"}
    found = {name: value for name, value in given.items() if name in names}
    return HolmesStrategy(**found | ({} if request.topology is None else {"topology": request.topology}))


def make_best_plan(result: SearchResult, cost_model: CostModel, asked: Asked, *, sockets: bool) -> Plan:
    """Convert the best plan to a Plan, which the strategy can read from a file.

    Args:
        asked: the options of the strategy's settings.
        sockets: the run sends by gloo.
    """
    best, model, topology = result.best, cost_model.model, cost_model.network.topology
    layout = best.run.layout
    notes = [
        f"lightning-holmes plan: {best.step_s:.3g} s a step by prediction; {best.reason}",
        f"batch: {best.batch_samples // layout.data} samples a replica, {best.batch_samples} a step; the data loader must give them",
    ]
    if result.memory_note is not None:
        notes.append(result.memory_note)
    notes += cost_model.network.link_notes()
    placement = make_placement(
        topology,
        world_size=layout.num_devices,
        pipeline_parallel_size=layout.pipeline,
        tensor_parallel_size=layout.tensor,
    )
    sharding: Sharding = "parameters" if best.sharded_parameters else "optimizer" if best.sharded_optimizer else "none"
    known = Known(topology=topology, placement=placement, layers=model.layer_list)
    plan = plan_of_prediction(known, replace(asked, layers=model.layer_list), best, notes)
    # without groups: a run makes its own
    return complete(plan, topology=topology, sharding=sharding, sockets=sockets, asked=asked)


def _space(request: PlanRequest, asked: Asked, *, is_plan: bool, model: ModelCost) -> SearchSpace:
    """The search space: the choices that the strategy's settings leave open; the plan's own choices if they name a plan file."""
    tensor = (asked.tensor_parallel_size,) if asked.tensor_parallel_size > 1 or is_plan else None
    size = asked.pipeline_parallel_size
    if is_plan and asked.partition == "uniform":  # a plan for a module that is not split, on one stage
        asked = replace(asked, partition=(model.num_layers,))
    return space_of(
        asked,
        splits=can_split(model),
        pipeline=None if size == "auto" else (size,),
        tensor=tensor or request.tensor_parallel_sizes,
    )


def check_writable(path: str | None, option: str) -> None:
    """Raise ConfigurationError early for a file that cannot be written: an unknown plot format, or a missing folder."""
    if path is not None and option == "--plot" and Path(path).suffix.lower() not in PLOT_FORMATS:
        raise ConfigurationError(f"{option}={path!r}: the file's name must end in {' or '.join(PLOT_FORMATS)}")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigurationError(f"{option}={path!r}: {Path(path).absolute().parent} does not exist; create it")
