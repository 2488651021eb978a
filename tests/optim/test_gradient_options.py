"""The options of gradient synchronisation: which are refused, and the note if an option has no effect."""

from typing import Any

import pytest

from lightning_holmes import HolmesStrategy
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.optim.gradient_options import GradientOptions
from lightning_holmes.plan.placement import Placement

TWO_STAGES = Placement(((0, 1), (2, 3)))
REPLICAS = Placement(((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_sync": "ring"}, "'all_reduce', 'reduce_scatter', 'p2p', 'hierarchical'"),
    ],
)
def test_what_is_wrong_by_itself_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HolmesStrategy(**options)


def test_what_no_group_can_use_is_refused_and_what_has_nothing_to_do_is_noted() -> None:
    inside, crossing = ["a", "a", "b", "b"], ["a", "b", "a", "b"]
    hierarchical = GradientOptions(gradient_sync="hierarchical")
    for placement, clusters in ((TWO_STAGES, inside), (TWO_STAGES, crossing), (REPLICAS, ["a", "a", "a", "b"])):
        with pytest.raises(ConfigurationError, match="in each of several clusters"):
            hierarchical.notes(placement, clusters)
    assert hierarchical.notes(REPLICAS, crossing) == []
    alone = GradientOptions(gradient_sync="p2p").notes(Placement(((0,), (1,))), ["a", "b"])
    assert "there is one replica" in " ".join(alone)
