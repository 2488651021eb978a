"""Each module of wild_modules.py is exact or refused, as its table says.

Exact modules are compared twice: by ``lightning_holmes.check``, and with a loop written here without any code of the
package.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import SimulatedPipeline, simulated
from torch import Tensor, nn
from wild import wild_modules
from wild.wild_modules import CASES, SAMPLES, Case

import lightning_holmes
from lightning_holmes.checking import first_step

DOCUMENT = Path(__file__).parents[2] / "docs" / "exactness.md"


def part(value: Any, start: int, stop: int) -> Any:
    """Return the samples from ``start`` to ``stop`` of a batch; handles the batches of wild_modules.py only."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim else value
    if isinstance(value, dict):
        return {k: part(v, start, stop) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(part(v, start, stop) for v in value)
    if isinstance(value, list):
        return value[start:stop]
    return value


def microbatches(module: Any, batch: Any, count: int) -> list[tuple[Any, int]]:
    if count == 1:
        return [(batch, SAMPLES)]
    first = -(-SAMPLES // 2)
    if hasattr(module, "split_batch"):
        return list(zip(module.split_batch(batch, count), [first, SAMPLES - first], strict=True))
    assert count == 2
    return [(part(batch, 0, first), first), (part(batch, first, SAMPLES), SAMPLES - first)]


def plain_loop(module: Any, batch: Any, count: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, gradients and buffers of a training step in one process, microbatch by microbatch."""
    module = copy.deepcopy(module)
    module.log = module.log_dict = lambda *args, **kwargs: None
    module.train()
    total = 0.0
    for microbatch, size in microbatches(module, copy.deepcopy(batch), count):
        output = module.training_step(microbatch, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        (loss * size / SAMPLES).backward()
        total += float(loss) * size / SAMPLES
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return total, gradients, dict(module.named_buffers())


def staged_run(module: Any, batch: Any, options: dict[str, Any]) -> SimulatedPipeline:
    size, chunks = options.get("pipeline_parallel_size", 2), options.get("num_chunks", 1)
    schedule, partition = options.get("schedule", "1f1b"), options.get("partition", "uniform")
    with first_step.attached(module):
        cast = simulated(module, batch, size, schedule, chunks, partition)
        cast.run("training_step", batch, options.get("num_microbatches", 2))
    return cast


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_exact_or_refused(case: Case) -> None:
    module, batch = case.make()
    report = lightning_holmes.check(module, batch, **case.options)
    bad = [f"{row.what}: {row.plain} against {row.staged} {row.reason}" for row in report.rows if not row.ok]
    if case.refused:
        assert report.refused is not None, f"not refused; differs in {bad}"
        assert case.refused in report.refused
        return
    assert report.refused is None
    assert not bad
    if not case.random:
        compare_with_plain_loop(case)


def compare_with_plain_loop(case: Case) -> None:
    module, batch = case.make()
    count = case.options.get("num_microbatches", 2)
    loss, gradients, buffers = plain_loop(module, batch, count)
    cast = staged_run(module, batch, case.options)
    output = cast.results[0].output
    staged_loss = float(output["loss"] if isinstance(output, dict) else output)
    assert staged_loss == pytest.approx(loss, rel=1e-5)
    staged = {n: g for n, g in cast.gradients().items() if g is not None}
    assert set(gradients) <= set(staged)
    scale = max((float(g.abs().max()) for g in gradients.values()), default=1.0)
    for name, gradient in staged.items():
        want = gradients.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    state = cast.state()
    for name, buffer in buffers.items():
        torch.testing.assert_close(state[f"buffer {name}"], buffer, msg=lambda m, n=name: f"{n}: {m}")


BESIDE = ("UNetSkips", "DenseNet", "LogsFloatBetween", "EarlyExit", "CountBetween", "NumpyBetween")


@pytest.mark.parametrize("name", BESIDE)
def test_values_beside_the_hidden_state_are_exact_between_stages_of_one_rank(name: str) -> None:
    """Such values are refused between ranks; here one rank has one layer a stage and runs all microbatches through a stage
    before the next."""
    case = next(c for c in CASES if c.name == name)
    assert case.refused
    module, batch = case.make()
    layers = 6 if name == "UNetSkips" else 4
    options = {"pipeline_parallel_size": 1, "schedule": "breadth_first", "num_chunks": layers}
    case = dataclasses.replace(case, options=options)
    report = lightning_holmes.check(module, batch, **options)
    assert report.refused is None and report.stages == (1,) * layers
    assert all(row.ok for row in report.rows)
    if not case.random:
        compare_with_plain_loop(case)


def test_checkpointing_recomputes_the_same_dropout_around_layers() -> None:
    def gradients(wrap: bool) -> dict[str, Tensor]:
        case = next(c for c in CASES if c.name == "CheckpointedDropout")
        module, batch = case.make()
        module.wrap = wrap
        return {n: g for n, g in staged_run(module, batch, {}).gradients().items() if g is not None}

    plain, recomputed = gradients(False), gradients(True)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(wild_modules.WIDTH, wild_modules.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


@pytest.mark.parametrize("form", ["network", "layers"])
def test_layers_that_the_user_compiled_are_compiled_once_and_without_the_gates(form: str) -> None:
    def graphs(count: int) -> list[torch.fx.GraphModule]:
        found: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            found.append(graph)
            return graph.forward

        torch.compiler.reset()
        module, batch = next(c for c in CASES if c.name == "CompiledNet").make()
        module.model = net = module.model._orig_mod
        net.layers = nn.ModuleList(_Block() for _ in range(4))
        if form == "network":
            module.model = torch.compile(net, backend=backend)
        else:
            net.layers = nn.ModuleList(torch.compile(layer, backend=backend) for layer in net.layers)
        staged_run(module, batch, {"num_microbatches": count})
        return found

    few, many = graphs(1), graphs(2)
    assert (len(few), len(many)) == (1, 2), (
        "all four layers share a graph; microbatches of another size add one for any"
    )
    assert all("relu" in [str(node.target) for node in graph.graph.nodes] for graph in many)


def test_table_in_the_documentation() -> None:
    section = DOCUMENT.read_text().split("## Modules tried", 1)[1]
    table = "".join(line + "\n" for line in section.splitlines() if line.startswith("|"))
    assert table == wild_modules.make_table(), "run `python tests/wild/wild_modules.py` and paste what it prints"


@pytest.mark.parametrize("form", ["network", "layers in place"])
def test_a_graph_that_may_not_break_is_refused_with_the_cure(form: str) -> None:
    torch.compiler.reset()  # torch no longer compiles code that other tests have compiled too often
    module, batch = next(c for c in CASES if c.name == "CompiledNet").make()
    module.model = net = module.model._orig_mod
    net.layers = nn.ModuleList(_Block() for _ in range(4))
    module.model = torch.compile(net, backend="eager", fullgraph=True)
    if form == "layers in place":
        module.model = net
    report = lightning_holmes.check(module, batch)
    assert (report.refused is None) == (form == "layers in place")
    if report.refused is not None:
        assert "fullgraph=True" in report.refused and "one by one" in report.refused


def test_a_patched_forward_is_compared_and_leaves_the_module_alone() -> None:
    """A patched forward may keep the layer's own forward, a bound method, in a closure."""
    module, batch = next(c for c in CASES if c.name == "CompiledNet").make()
    module.model = net = module.model._orig_mod
    net.layers = nn.ModuleList(nn.Sequential(_Block(), nn.BatchNorm1d(wild_modules.WIDTH)) for _ in range(4))
    for layer in net.layers:
        layer.forward = (lambda own: lambda x: 1.5 * own(x))(layer.forward)
    before = copy.deepcopy(net.state_dict())
    report = lightning_holmes.check(module, batch, num_microbatches=1)
    assert report.ok, str(report)
    assert "gradient model.layers.2.0.linear.weight" in {row.what for row in report.rows}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
