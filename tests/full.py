"""Which tests only `make test-all` runs: those that repeat a promise in more layouts, sizes, faults or networks.

`make test` leaves them out, so that it takes a few minutes; each promise is tested by at least one fit there. conftest.py marks
the tests as ``full``. A test that is named nowhere here is run by both. Paths are relative to tests/; tests may have gone.
"""

from collections.abc import Collection
from fnmatch import fnmatch
from zlib import crc32

FULL = (
    *("soak/*", "benchmarks/*", "testbed/*", "gpu/*"),
    *("strategy/test_launchers.py", "strategy/test_later_*.py", "strategy/test_optimizer_nodes.py"),
    *("strategy/test_shards_in_a_pipeline.py", "strategy/test_uneven.py", "strategy/test_whole_steps.py"),
    *("checkpoint/test_kills.py", "checkpoint/test_matrix.py", "optim/test_node_session.py::test_memory_*"),
    # whole processes with limits of seconds: strategy/test_bad_input.py has the promise itself, with its own limit of 30 s
    *("comm/test_failure.py::test_a_rank_that_one_call_holds*", "comm/test_failure.py::test_ranks_that_*"),
    *("comm/test_failure.py::test_a_rank_that_never_joins*", "strategy/test_late.py::test_a_rank_*"),
    # processes that import everything anew
    *("test_wheel.py", "test_lightning_package.py::test_a_*", "test_cli.py::test_recipe_trains*"),
    *("models/test_hf.py::test_hf_is_loaded*", "models/test_gpt.py::test_learns*", "test_recipes.py::test_fit_*"),
    *("data/test_recipes_text.py::test_text_becomes*", "data/test_recipes_callbacks.py::test_summary*"),
    *("test_torch_private.py::test_gloo_has_no_ibverbs", "plan/search/test_comparison.py::test_4096*"),
    *("test_recipes.py::test_a_*", "test_recipes.py::test_wandb_*", "test_recipes.py::test_fine_tuning*"),
    *("test_recipes.py::test_the_demo*", "strategy/test_outside_state.py::test_trials*", "optim/test_sharded.py"),
    # large or random inputs of one function, which runs with small ones, too
    *("plan/test_simulator.py::test_large_*", "pipeline/test_profile.py::test_39_billion*"),
    *("plan/test_placement.py::test_any_*", "plan/test_self_adapting.py::*trying*", "strategy/test_ten_starts.py"),
    *("plan/search/test_comparison.py::test_the_pipeline_*", "test_private_names.py"),
    *("cluster/test_hardware.py::test_any_*", "cluster/test_topology.py::test_round_trip*"),
)
"""Files and tests that are left out whole."""

KEPT = (
    *("strategy/test_large_models.py::test_on_optimizer_nodes*pretrained*", "test_recipes.py::test_fit_runs*"),
    "strategy/test_sharded_optimizer.py::test_master_weights*a folder*",
)
"""Of these and the following, what `make test` runs all the same."""

FIRST = (
    *("testbed/test_training.py", "testbed/test_faults.py"),
    *("strategy/test_large_models.py", "strategy/test_lightning_features.py", "strategy/test_optimizers.py"),
    *("strategy/test_sigterm.py", "strategy/test_snapshots.py", "strategy/test_tensor_parallel.py"),
    *("strategy/test_breadth_first.py", "strategy/test_runtime_plan.py", "strategy/test_whole_steps.py"),
    *("commands/test_plan_command.py", "strategy/test_graphs.py", "strategy/test_nothing_stays_patched.py"),
)
"""Files of which `make test` runs the first test only: that is where the promise stands."""

SAMPLED = {
    "lightning_contract/test_contract.py::test_holds*": 24,
    "wild/test_wild_modules.py::test_exact_or_refused*": 6,
    "wild/test_wild_in_shards.py::test_exact_or_refused_in_shards*": 10,
    "optim/test_node_session.py::test_on_disk_it_is*": 8,
    "strategy/test_tripwires.py::*": 3,
    "strategy/test_hooks.py::*": 5,
    "strategy/test_step_state.py::*": 4,
    "fuzz/test_fuzz.py::test_mended*": 20,
    "parity/test_parity.py::test_equals_the_baseline*": 4,
    "strategy/test_bad_input.py::test_a_mistake*": 3,
    "strategy/test_bad_input.py::test_*rank*": 4,
    "strategy/test_host_order.py::*": 2,
    "strategy/test_optimizers.py::*": 2,
    "strategy/test_large_models.py::test_weights*": 3,
    "strategy/test_lightning_features.py::*": 2,
    "strategy/test_sharded_parameters.py::test_a_checkpoint*": 3,
    "strategy/test_sharded_parameters.py::test_a_module*": 3,
    "strategy/test_sharded_parameters.py::test_what_needs*": 2,
    "strategy/test_sharded_optimizer.py::test_master_weights*": 2,
    "strategy/test_replicas_as_ddp.py::test_replicas*": 7,
    "fuzz/test_fuzz.py::test_exact*": 3,
}
"""Tests of many cases, of which `make test` runs one in this many, whichever the order of the cases. A launch of many cases runs those that
are chosen (launch.chosen)."""

CASES = {"contract/test_contract.py::*": "plain-*", "tripwires.py::*": "*-sharded]", "snapshots.py::*": "4]"}
"""By the end of a test's path, the cases that are left out."""


def is_full(test: str, *, is_first: bool, case: str) -> bool:
    """Return whether only `make test-all` runs a test.

    Args:
        test: "folder/file.py::name", without the parameters.
        is_first: no test stands before it in its file.
        case: the parameters; "" if there are none.
    """
    if _matches(test + case, KEPT):
        return False
    if not is_first if _matches(test, FIRST) else _matches(test, FULL):
        return True
    if any(fnmatch(test, f"*{name}") and fnmatch(case, cases) for name, cases in CASES.items()):
        return True
    every = next((every for name, every in SAMPLED.items() if fnmatch(test, name)), 1)
    return case != "" and crc32(case.encode()) % every != 0


def is_full_file(path: str) -> bool:
    """Return whether all tests of a file are left out, so that it need not be imported."""
    kept = (name.partition("::")[0] for name in (*KEPT, *FIRST))
    return _matches(path, FULL) and not any(fnmatch(path, name) for name in kept)


def _matches(test: str, names: Collection[str]) -> bool:
    return any(fnmatch(test, name) or fnmatch(test.partition("::")[0], name) for name in names)
