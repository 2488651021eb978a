"""The output of a search: table, JSON, picture and page."""

import dataclasses
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import find_device_type
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.plan.plan_page import plan_page, save_plan_page
from lightning_holmes.plan.plan_table import (
    HEADINGS,
    column_widths,
    describe_counts,
    describe_task,
    prediction_cells,
    print_search,
    search_data,
)
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.schedule import make_schedule
from lightning_holmes.plan.search import SearchResult, search
from lightning_holmes.plan.search.notes import describe_result
from lightning_holmes.plan.simulator import StepCosts, simulate
from lightning_holmes.plan.timeline import Span, Timeline
from lightning_holmes.plan.timeline_plot import COLOURS, _alone, _draw, save_timeline_plot, timeline_svg
from lightning_holmes.plan.training import Training

TOPOLOGY = """
clusters:
  - name: east <1>
    hosts:
      - {name: e, count: 2, devices: 2, nics: [{name: ib, kind: infiniband, bandwidth: 200 Gbit/s},
                                               {name: eth, kind: ethernet, bandwidth: 25 Gbit/s}]}
  - name: west
    hosts:
      - {name: w, count: 2, devices: 2, nics: [{name: roce, kind: roce, bandwidth: 200 Gbit/s},
                                               {name: eth, kind: ethernet, bandwidth: 25 Gbit/s}]}
links:
  - {ends: [east <1>, west], transport: ethernet, bandwidth: 25 Gbit/s, latency: 1 ms}
"""


@pytest.fixture(scope="module")
def searched() -> tuple[SearchResult, CostModel]:
    layer = LayerCost(forward=1e12, backward=2e12, parameter_bytes=4e8, activation_bytes=1e7, held_bytes=1e8)
    model = ModelCost(unit="flops", microbatch_samples=1, layers=(layer,) * 8, tokens_per_sample=100, name="small")
    device = find_device_type("A100-80GB")
    network = Network(Topology.from_yaml_text(TOPOLOGY), local_bytes_per_s=device.local_bytes_per_s)
    costs = CostModel(model, network, devices=(device, device), training=Training(batch_samples=32))
    return search(costs), costs


def test_table(searched: tuple[SearchResult, CostModel]) -> None:
    stream = io.StringIO()
    print_search(*searched, file=stream)
    text = stream.getvalue()
    for words in ("small: 8 layers", "Plans, the best first", "Chosen: pipeline", "  2. pipeline", "candidates"):
        assert words in text
    assert "TFLOPS/GPU" in text and "infiniband" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("step_s", [0.5, 12345.6, 3e7])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "eager_interleaved_1f1b", "breadth_first", "eager_1f1b"])
def test_nothing_is_cut_from_a_wide_table(
    searched: tuple[SearchResult, CostModel], schedule: str, step_s: float
) -> None:
    """Every word of a row appears uncut in the table; the row is printed alone, so that another row cannot hide a
    missing word."""
    result, costs = searched
    num_chunks = 1 if schedule == "eager_1f1b" else 12
    run = RunShape(
        layout=Layout(pipeline=64, tensor=16, data=1024, across="data"),
        schedule=schedule,
        num_microbatches=1024,
        microbatch_samples=64,
        num_chunks=num_chunks,
    )
    wide = dataclasses.replace(
        result.best,
        run=run,
        partition=Partition((3, 2) * 32 * num_chunks),
        timeline=dataclasses.replace(
            result.best.timeline, step_s=step_s, peak_memory_bytes=(int(0.0325 * 2**30),), exposed_s={"pipeline": 0.0}
        ),
        nic_bytes={"ethernet": 1.23e9, "infiniband": 4.56e14, "roce": 7.89e6},
        memory_limits=(73 * 2**30,),
    )
    result = dataclasses.replace(result, best=wide, runners_up=())
    stream = io.StringIO()
    print_search(result, costs, file=stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    table = lines[lines.index(next(line for line in lines if line.startswith("Plans"))) :]
    table = table[: next(index for index, line in enumerate(table) if line.startswith("Chosen"))]
    words = Counter(word for line in table for word in line.split())
    for cell in prediction_cells(wide):
        assert not Counter(cell.split()) - words, cell
    assert "of 73" in "\n".join(table) and "0.0325" in words


def test_columns_are_broken_between_words_first() -> None:
    rows = [["aa bb", "cccc"], ["a", "dd"]]
    assert column_widths(rows, 20) == [5, 4]
    assert column_widths(rows, 6) == [2, 4]
    assert column_widths(rows, 4) == [2, 2]
    assert column_widths(rows, 0) == [1, 1]


def test_what_plans_lack_is_told_everywhere(searched: tuple[SearchResult, CostModel]) -> None:
    result, costs = searched
    stream = io.StringIO()
    print_search(result, costs, file=stream)
    assert "WARNING" not in stream.getvalue() + plan_page(result, costs)
    result = dataclasses.replace(result, memory_note="memory: 2 < 3 GiB")
    print_search(result, costs, file=stream)
    assert "\nWARNING: memory: 2 < 3 GiB\n" in stream.getvalue()
    assert "<strong>WARNING: memory: 2 &lt; 3 GiB</strong>" in plan_page(result, costs)
    assert search_data(result, costs)["memory_note"] == "memory: 2 < 3 GiB"


def test_unlike_devices_of_a_cluster_are_counted_by_type(searched: tuple[SearchResult, CostModel]) -> None:
    result, costs = searched
    fast, slow = find_device_type("A100-80GB"), find_device_type("V100-32GB")
    mixed = CostModel(
        costs.model,
        costs.network,
        devices=(fast, fast),
        host_devices=(fast, slow, fast, fast),
        training=costs.training,
    )
    told = describe_task(mixed)
    assert "east <1>: 2 x A100-80GB (0.84 of peak" in told and " and 2 x V100-32GB (0.60 of peak, assumed)" in told
    assert "west: 4 x A100-80GB (0.84" in told
    east, west = search_data(result, mixed)["clusters"]
    assert (east["device_types"], west["device_types"]) == ({"A100-80GB": 2, "V100-32GB": 2}, {"A100-80GB": 4})
    assert (east["device_type"], west["device_type"]) == ("A100-80GB and V100-32GB", "A100-80GB")
    page = plan_page(result, mixed)
    assert "<td>2 x A100-80GB</td>" in page and "<td>2 x V100-32GB</td>" in page


def test_a_link_that_one_pair_has_measured_is_noted(searched: tuple[SearchResult, CostModel]) -> None:
    result, costs = searched
    assert search_data(result, costs)["link_notes"] == [], "the file states it"
    measured = Topology.from_yaml_text(TOPOLOGY.replace("latency: 1 ms}", "latency: 1 ms, measured: true}"))
    network = Network(measured, local_bytes_per_s=1e11)
    device = find_device_type("A100-80GB")
    costs = CostModel(costs.model, network, devices=(device, device), training=costs.training)
    (note,) = search_data(result, costs)["link_notes"]
    assert note.startswith("link east <1> - west: ") and "shared by 2 hosts if it is one line" in note
    stream = io.StringIO()
    print_search(result, costs, file=stream)
    assert note in " ".join(stream.getvalue().split()) and "shared by 2 hosts" in plan_page(result, costs)
    options = PlanOptions(
        pipeline_parallel_size=4,
        num_microbatches=16,
        eval_num_microbatches=1,
        schedule="eager_1f1b",
        num_chunks=1,
        partition="uniform",
        layers=None,
    )
    assert note in describe_result(result, costs, options), "a run's plan says it, too"


def test_json_has_the_documented_keys(searched: tuple[SearchResult, CostModel]) -> None:
    data = json.loads(json.dumps(search_data(*searched), allow_nan=False))
    assert set(data) == {
        "model",
        "batch_samples",
        "clusters",
        "best",
        "runners_up",
        "num_candidates",
        "left_out",
        "memory_note",
        "sharding_note",
        "link_notes",
    }
    assert Timeline.from_data(data["best"].pop("timeline")).step_s == data["best"]["step_s"]
    assert all(set(entry) == set(data["best"]) for entry in data["runners_up"])
    assert ModelCost.from_data(data["model"]) == searched[1].model


def test_page_is_whole_and_escapes(searched: tuple[SearchResult, CostModel], tmp_path) -> None:
    text = plan_page(*searched)
    assert (
        not re.search(r"""(src|href)\s*=\s*["'](https?:)?//""", text)
        and "<script" not in text
        and "@import" not in text
    )
    assert "east &lt;1&gt;" in text and "east <1>" not in text
    assert text.count("<svg") == 1 and all(heading in text for heading in HEADINGS)
    save_plan_page(*searched, tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == text
    with pytest.raises(ConfigurationError, match="cannot be written"):
        save_plan_page(*searched, tmp_path / "no folder" / "plan.html")


def test_pictures(tmp_path) -> None:
    costs = StepCosts(forward_s=(1,) * 3, backward_s=(2,) * 3, reduce_s=(1,) * 3, update_s=(0.5,) * 3)
    timeline = simulate(make_schedule("1f1b", pipeline_parallel_size=3, num_microbatches=4), costs)
    svg = timeline_svg([timeline, timeline], title="two")
    root = ElementTree.fromstring(svg)
    words = {"".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")}
    assert {"stage 0", "stage 2", "forward", "backward", "gradient reduction", "idle", "optimizer", "two"} <= words
    assert "transfer" not in words  # this step has none
    assert svg == timeline_svg([timeline, timeline], title="two")
    save_timeline_plot([timeline], tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match=r"\.png or \.svg"):
        save_timeline_plot([timeline], tmp_path / "step.pdf")


def test_a_picture_says_whose_clocks_it_shows_and_what_the_colours_mean() -> None:
    spans = (Span("backward", 0.0, 3.0, 0, 0), Span("bucket_reduce", 1.0, 2.0, 0, -1), Span("wait", 3.0, 4.0, 0, -1))
    measured = Timeline(spans=(spans, spans), step_s=4.0, exposed_s={}, peak_memory_bytes=(0, 0), source="measured")
    svg = _draw([measured], "", "svg", [(1, 3)]).decode()
    assert "measured on ranks 1, 3: 4 s" in svg and "stage 1, rank 3" in svg
    assert "waiting: held up by another rank" in svg and "idle: nothing to do" in svg
    drawn = [colour for kind, colour in COLOURS.items() if kind not in ("wait", "idle", "other")]
    assert len(set(drawn)) == len(drawn)


def test_a_reduction_leaves_the_backward_that_it_runs_beside_to_be_seen() -> None:
    row = [Span("backward", 0.0, 2.0, 0, 0), Span("reduce", 1.0, 5.0, 0, -1), Span("update", 4.0, 4.5, 0, -1)]
    assert _alone([row[1]], row) == [(2.0, 2.0), (4.5, 0.5)]
    assert _alone([Span("reduce", 0.5, 1.0, 0, -1)], row) == []


def test_without_matplotlib_the_package_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = simulate(make_schedule("1f1b", pipeline_parallel_size=1, num_microbatches=1), StepCosts.even(1))
    with pytest.raises(ConfigurationError, match=r"lightning-holmes\[plot\]"):
        save_timeline_plot([timeline], tmp_path / "step.png")


def test_counts_are_short() -> None:
    assert describe_counts((8, 8, 8, 6)) == "3 x 8, 6"
    assert describe_counts((1, 2) * 8) == "1, 2, 1, ..., 1, 2"
