"""Plans: the YAML round trip and the printed report."""

import dataclasses
import io
from pathlib import Path

import pytest
from plans import plan_of

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.groups import GroupPlan
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.tables import print_plan

PLAN = plan_of(
    (0, 1),
    (2, 3),
    stages=(5, 4),
    num_microbatches=8,
    eval_num_microbatches=2,
    layers="model.layers",
    clusters=("berlin", "paris+rome"),
    groups=(
        GroupPlan(name="data0", axis="data_parallel", ranks=(0, 1), transport="gloo", reason="the only one on CPU"),
        GroupPlan(name="pipe0", axis="pipeline", ranks=(0, 2), transport="gloo", reason="crosses [clusters]"),
        GroupPlan(name="pipe1", axis="pipeline", ranks=(1, 3), transport="gloo", reason="crosses [clusters]"),
        GroupPlan(name="world", axis="world", ranks=(0, 1, 2, 3), transport="gloo on eth0", reason="reaches all"),
    ),
    notes=("pipeline_parallel_size=2: one pipeline rank per cluster", "a note: with [brackets] and ünïcode"),
)


def test_round_trip(tmp_path: Path) -> None:
    assert Plan.from_yaml_text(PLAN.to_yaml()) == PLAN
    PLAN.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == PLAN
    assert "!!" not in PLAN.to_yaml()
    bare = dataclasses.replace(PLAN, groups=(), notes=())
    assert Plan.from_yaml_text(bare.to_yaml()) == bare


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_microbatches: 8", "num_microbatch: 8", r"p\.yaml, line 3: .*did you mean 'num_microbatches'"),
        ("notes:", "made_for: {module: GPT}\nnotes:", "unknown key 'made_for'"),
        ("schedule: 1f1b", "schedule: 2f2b", r"p\.yaml, line 5: schedule: '2f2b'"),
        ("data_parallel_size: 2", "data_parallel_size: 3", "placement is 2 x 2"),
        ("num_chunks: 1", "num_chunks: 2", "partition has 2 stages"),
        ("- berlin\n", "", "1 entries in clusters"),
        ("collectives: []", "collectives: [p2p]", "one for each of the 2 pipeline ranks"),
        ("collectives: []", "collectives: [p2p, ring]", "all_reduce, reduce_scatter, p2p, hierarchical"),
        ("axis: data_parallel", "axis: tensor", r"groups\[0\]\.axis: 'tensor'"),
    ],
)
def test_mistakes(old: str, new: str, message: str) -> None:
    text = PLAN.to_yaml()
    assert text.count(old) == 1
    with pytest.raises(ConfigurationError, match=message):
        Plan.from_yaml_text(text.replace(old, new), source="p.yaml")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        Plan.load(tmp_path / "nowhere.yaml")


def test_report() -> None:
    out = io.StringIO()
    print_plan(PLAN, out, parameter_counts=[1_234_567, 89])
    text = out.getvalue()
    for word in (
        *("pipeline 2 x data 2", "1f1b", "8 microbatches", "berlin", "paris+rome", "0-4", "5-8"),
        "layers of model.layers",
        *("1,234,567", "data_parallel over gloo"),
        "crosses [clusters] [ranks 0, 2; 1, 3]",
        "world over gloo on eth0: reaches all [ranks 0-3]",
        "one pipeline rank per cluster",
        "with [brackets] and ünïcode",
    ):
        assert word in text, text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text
