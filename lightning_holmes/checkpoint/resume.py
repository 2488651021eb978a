"""What a run needs beside Lightning's own checkpoint to go on as if it had never stopped.

Lightning saves the state of rank 0's data loaders; here every replica has its own. Random numbers of the steps are
drawn from a seed of the run, which is saved. One file holds the run's plan, too; a folder has a file for it.
"""

from collections.abc import Sequence
from typing import Any

from lightning_holmes.errors import ConfigurationError

KEY = "lightning_holmes"
SAMPLES_SEEN = "samples_seen"
"""A loader state with this key counts samples of all replicas together, and so fits any number of them."""


def loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    """The states of the training loaders in Lightning's checkpoint."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return list(state.get("combined_loader", []))


def add(checkpoint: dict[str, Any], *, base_seed: int, num_microbatches: int, replicas: Sequence[list[Any]]) -> None:
    """Write into ``checkpoint`` what the functions below read.

    Args:
        num_microbatches: of a replica's batch; 0 where nothing was trained.
        replicas: each one's loader states.
    """
    checkpoint[KEY] = {
        "base_seed": base_seed,
        "num_microbatches": num_microbatches,
        "data_parallel_size": len(replicas),
        "loader_states": list(replicas),
    }


def add_plan(checkpoint: dict[str, Any], plan: str) -> None:
    """Write a plan's YAML into ``checkpoint``, for :func:`take_plan`."""
    if plan:
        checkpoint[KEY] = checkpoint.get(KEY, {}) | {"plan": plan}


def take_plan(checkpoint: dict[str, Any]) -> str:
    """Take the plan's YAML out of ``checkpoint``; nothing where it has none."""
    ours = dict(checkpoint.get(KEY, {}))
    plan = str(ours.pop("plan", ""))
    if plan:
        checkpoint[KEY] = ours
    return plan


def base_seed(checkpoint: dict[str, Any]) -> int | None:
    """The seed of the run that was saved, if this package saved it."""
    seed = checkpoint.get(KEY, {}).get("base_seed")
    return None if seed is None else int(seed)


def num_microbatches(checkpoint: dict[str, Any], num_replicas: int) -> int | None:
    """The number with which ``num_replicas`` replicas have as many microbatches in all as the run that was saved, and so
    the same random numbers; its own number where theirs would be no whole one. None where it is not known."""
    saved = checkpoint.get(KEY, {})
    own = int(saved.get("num_microbatches", 0))
    in_all = own * int(saved.get("data_parallel_size", 1))
    return (in_all // num_replicas if in_all % num_replicas == 0 else own) or None


def give_loaders_their_states(checkpoint: dict[str, Any], replica: int, num_replicas: int) -> None:
    """Put this replica's loader states where Lightning looks for them.

    Raises:
        ConfigurationError: the run stopped inside an epoch with another number of replicas, and the loader's state
            does not say where that is for this number.
    """
    states = loader_states(checkpoint)
    if not states or all(SAMPLES_SEEN in state for state in states):
        return
    fit_loop = checkpoint["loops"]["fit_loop"]
    saved = {"data_parallel_size": 1, "loader_states": [states]} | checkpoint.get(KEY, {})
    if saved["data_parallel_size"] == num_replicas:
        fit_loop["state_dict"]["combined_loader"] = saved["loader_states"][replica]
        return
    if _is_inside_epoch(fit_loop):
        raise ConfigurationError(
            f"the checkpoint was saved inside an epoch by {saved['data_parallel_size']} replicas, each with a loader "
            f"state of its own, which say nothing about {num_replicas} replicas: resume with as many replicas, from the "
            f"end of an epoch, or with a loader whose state has the key {SAMPLES_SEEN!r}, counting samples of all "
            f"replicas, as lightning_holmes.data's have"
        )
    del fit_loop["state_dict"]["combined_loader"]  # a new epoch begins


def _is_inside_epoch(fit_loop: dict[str, Any]) -> bool:
    progress = fit_loop.get("epoch_loop.batch_progress", {})
    return not progress.get("is_last_batch", False) and progress.get("current", {}).get("ready", 0) > 0
