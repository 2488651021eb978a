"""The state beyond Lightning's own checkpoint that a run needs to resume as if it had never stopped.

Lightning saves the state of rank 0's data loaders; here every replica's is saved. Random numbers of the steps are
drawn from a seed of the run, which is saved. A plain file also holds the run's plan; a folder has a file for it.
"""

from collections.abc import Mapping
from typing import Any

from lightning_holmes.checkpoint.membership import Membership
from lightning_holmes.errors import ConfigurationError

KEY = "lightning_holmes"
SAMPLES_SEEN = "samples_seen"
"""A loader state with this key counts the samples of all replicas together, and so can be loaded with any number of replicas."""


def loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """The states of the training loaders in Lightning's checkpoint."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return list(state.get("combined_loader", []))


def add(member: Membership, checkpoint: dict[str, Any], *, base_seed: int, num_microbatches: int) -> None:
    """Add to ``checkpoint`` the entries that the functions below read, among them each replica's loader states. All ranks must call.

    Args:
        num_microbatches: the number of microbatches of a replica's batch; 0 if nothing was trained.
    """
    states = loader_states(checkpoint)
    of_replica = dict(reversed(member.all_gather((member.replica, states)))) if states else {}
    checkpoint[KEY] = checkpoint.get(KEY, {}) | {
        "base_seed": base_seed,
        "num_microbatches": num_microbatches,
        "data_parallel_size": member.num_replicas,
        "loader_states": [of_replica.get(replica, []) for replica in range(member.num_replicas)],
    }


def add_plan(checkpoint: dict[str, Any], plan: str) -> None:
    """Add a plan's YAML to ``checkpoint``, for :func:`take_plan`."""
    if plan:
        checkpoint[KEY] = checkpoint.get(KEY, {}) | {"plan": plan}


def take_plan(checkpoint: dict[str, Any]) -> str:
    """Remove the plan's YAML from ``checkpoint`` and return it; "" if it has none."""
    ours = dict(checkpoint.get(KEY, {}))
    plan = str(ours.pop("plan", ""))
    if plan:
        checkpoint[KEY] = ours
    return plan


def base_seed(checkpoint: dict[str, Any]) -> int | None:
    """The seed of the saved run; None if this package did not save it."""
    seed = checkpoint.get(KEY, {}).get("base_seed")
    return None if seed is None else int(seed)


def num_microbatches(checkpoint: dict[str, Any], num_replicas: int) -> int | None:
    """The number of microbatches per replica with which ``num_replicas`` replicas have as many microbatches in total as the saved run, and
    so the same random numbers. If that is not an integer, the saved run's number per replica; None if that is not known."""
    saved = checkpoint.get(KEY, {})
    own = int(saved.get("num_microbatches", 0))
    in_all = own * int(saved.get("data_parallel_size", 1))
    return (in_all // num_replicas if in_all % num_replicas == 0 else own) or None


def give_loaders_their_states(checkpoint: dict[str, Any], replica: int, num_replicas: int) -> None:
    """Put this replica's loader states where Lightning looks for them.

    Raises:
        ConfigurationError: the run stopped inside an epoch with another number of replicas, and the loader's state
            cannot be converted to this number.
    """
    states = loader_states(checkpoint)
    if not states or all(SAMPLES_SEEN in state for state in states):
        return
    fit_loop = checkpoint["loops"]["fit_loop"]
    saved = {"data_parallel_size": 1, "loader_states": [states]} | checkpoint.get(KEY, {})
    if saved["data_parallel_size"] == num_replicas:
        fit_loop["state_dict"]["combined_loader"] = saved["loader_states"][replica]
        return
    progress = fit_loop.get("epoch_loop.batch_progress", {})
    if not progress.get("is_last_batch", False) and progress.get("current", {}).get("ready", 0) > 0:
        raise ConfigurationError(
            f"the checkpoint was saved inside an epoch by {saved['data_parallel_size']} replicas, each with a loader "
            f"state of its own, which say nothing about {num_replicas} replicas: resume with as many replicas, from the "
            f"end of an epoch, or with a loader whose state has the key {SAMPLES_SEEN!r}, counting samples of all "
            f"replicas, as lightning_holmes.data's have"
        )
    del fit_loop["state_dict"]["combined_loader"]  # start a new epoch
