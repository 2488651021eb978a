"""Complete fits with fewer bits between clusters: the results are near those without compression, and not equal,
since then nothing would be compressed."""

from compression_convergence import ROWS
from launch import launch


def test_every_way_to_compress_trains_nearly_alike() -> None:
    ranks = launch(2, "compression_convergence:train_all", (8, 1), timeout_s=150)
    assert ranks[0].keys() == ROWS.keys()
    exact = {1: ranks[0]["gradients as they are"][0], 2: ranks[0]["activations as they are"][0]}
    for name, options in ROWS.items():
        for rank, found in enumerate(ranks):
            training, validation = found[name][0]
            _, expected = exact[options["pipeline_parallel_size"]]
            assert validation == ranks[0][name][0][1], (name, rank)
            assert abs(validation - expected) < 0.1, (name, rank, training)
            assert (validation == expected) == name.endswith("as they are"), name
