"""Models that no process holds whole: built by configure_model without memory, or read in parts from a folder.

Initial weights must not depend on the layout; pretrained weights, and losses from them, are those of plain Lightning in one
process (1e-5 relative, fp32). Peak memory of a rank is measured in a run that only validates: no gradients, no optimizer
states.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from large_model_cases import fit, fit_all, go_on
from launch import forked_executable, launch

SEEDED = ["gpt", "hf", "plain_code", "meta", "reads_values"]
LLAMA = {"model_type": "llama", "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
MODEL_MB = 400.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write Llamas with save_pretrained, in several files each: "small", and "large" of 400 MB."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("models")
    for name, width, layers, shard in (("small", 32, 4, "40KB"), ("large", 1024, 8, "100MB")):
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(
            **LLAMA, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(path / name, max_shard_size=shard)
        assert len(list((path / name).glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def in_shards(folder: Path) -> list[dict[str, Any]]:
    """Results of two replicas that share all parameters: neither holds the whole module."""
    holmes = {"sharding": "parameters", "num_microbatches": 2}
    payload = {"folder": str(folder), "cases": [*SEEDED, "pretrained", "unset"], "holmes": holmes}
    return launch(2, "large_model_cases:fit_all", payload, timeout_s=200)


@pytest.fixture(scope="module")
def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results of one process with the strategy, and of two stages."""
    cases = [*SEEDED, "pretrained", "unset"]
    payload = {"folder": str(folder), "cases": cases, "holmes": {"pipeline_parallel_size": 1, "num_microbatches": 2}}
    alone = fit_all(payload)
    staged = launch(
        2,
        "large_model_cases:fit_all",
        payload | {"holmes": {"pipeline_parallel_size": 2, "num_microbatches": 2}},
        timeout_s=200,
    )
    return alone, staged


@pytest.mark.xdist_group("large_models")
@pytest.mark.parametrize("name", [*SEEDED, "pretrained"])
def test_weights_and_losses_do_not_depend_on_the_layout(name: str, results: Any) -> None:
    alone, staged = results[0][name], [rank[name] for rank in results[1]]
    assert "error" not in alone, alone
    whole = alone["start"]
    for result in staged:
        assert "error" not in result, result
        for key, value in result["start"].items():
            assert torch.equal(value, whole[key]), key
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert set(whole) == set().union(*(result["start"] for result in staged))
    if name != "reads_values":
        assert all(len(result["start"]) < len(whole) for result in staged), "a stage has all weights"


@pytest.mark.xdist_group("large_models")
@pytest.mark.parametrize("name", [*SEEDED, "pretrained"])
def test_in_shards_weights_and_losses_are_those_of_one_process(name: str, results: Any, in_shards: Any) -> None:
    """The initial weights and the losses equal those of one process, in training and in two validations after the fit, for
    which parameters stay sharded. With dropout each replica draws its own random numbers, so losses are not compared."""
    alone = results[0][name]
    for rank in in_shards:
        assert "error" not in rank[name], rank[name]
        assert rank[name]["start"].keys() == alone["start"].keys()
        for key, value in rank[name]["start"].items():
            assert torch.equal(value, alone["start"][key]), key
        if name in ("gpt", "hf", "pretrained"):
            assert rank[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.xdist_group("large_models")
def test_on_optimizer_nodes_no_worker_has_the_module(folder: Path) -> None:
    """The module is built on the node and stays there after a fit; the next fit, an evaluation and a checkpoint begin from there."""
    payload: dict[str, Any] = {"folder": str(folder), "cases": ["gpt", "pretrained"]}
    alone = go_on(payload | {"holmes": {"pipeline_parallel_size": 1, "num_microbatches": 2}})
    nodes = {"optimizer_nodes": 1, "num_microbatches": 2}
    payload["env"] = {"PYTHON_EXEC": forked_executable()}  # the interpreter of the optimizer nodes that rank 0 starts
    replicas = launch(2, "large_model_cases:go_on", payload | {"holmes": nodes, "cases": ["pretrained"]}, timeout_s=200)
    staged = payload | {"holmes": nodes | {"pipeline_parallel_size": 2}, "cases": ["gpt"]}
    stages = launch(2, "large_model_cases:go_on", staged, timeout_s=200)
    for name, expected in alone.items():
        for rank in [rank for rank in (*replicas, *stages) if name in rank]:
            assert rank[name]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            assert rank[name]["bytes"] < expected["bytes"] / 50
            for found, wanted in zip(rank[name]["saved"], expected["saved"], strict=True):
                assert found.keys() == wanted.keys()
                for key, value in wanted.items():
                    torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.xdist_group("large_models")
def test_pretrained_weights_and_losses_are_those_of_plain_lightning(results: Any, folder: Path) -> None:
    plain = fit("pretrained", str(folder), None)
    for result in [results[0]["pretrained"], *(rank["pretrained"] for rank in results[1])]:
        for key, value in result["start"].items():
            assert torch.equal(value, plain["start"][key]), key
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.xdist_group("large_models")
def test_what_nothing_initialises_is_named_on_every_rank(results: Any, in_shards: Any) -> None:
    for result in [results[0]["unset"], *(rank["unset"] for rank in (*results[1], *in_shards))]:
        assert "nothing gives gain a value" in result["error"]


@pytest.mark.xdist_group("large_models")
def test_peak_memory_of_a_rank_is_under_half_of_the_model(folder: Path) -> None:
    payload = {
        "folder": str(folder),
        "models": {
            "configure_model": {"pipeline_parallel_size": 4},
            "pretrained": {"pipeline_parallel_size": 4},
            "shared out": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        },
    }
    ranks = launch(4, "large_model_cases:measure", payload, timeout_s=200)
    for name in payload["models"]:
        grown = [rank[name] for rank in ranks]
        print(f"{name}: peak memory grew by {', '.join(f'{mb:.0f}' for mb in grown)} MB on the four ranks")
        assert max(grown) < MODEL_MB / 2
