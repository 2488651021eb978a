"""Arguments that are gone are refused by name, with what to do instead; nothing that HolmesStrategy takes is among them."""

import inspect

import pytest

from lightning_holmes import ConfigurationError, HolmesStrategy
from lightning_holmes.strategy.removed_arguments import REMOVED


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_an_argument_that_is_gone_is_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}=True: this argument is gone; .") as caught:
        HolmesStrategy(**{name: True})
    assert REMOVED[name] in str(caught.value)


def test_no_argument_is_both_taken_and_gone() -> None:
    taken = set(inspect.signature(HolmesStrategy.__init__).parameters)
    assert "topology" in taken
    assert not taken & set(REMOVED)


def test_an_unknown_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unknown_argument"):
        HolmesStrategy(unknown_argument=1)
