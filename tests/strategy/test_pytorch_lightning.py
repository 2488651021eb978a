"""A trainer of pytorch_lightning, Lightning's other package, gets one error that says which import to use."""

from launch import launch

WORDS = "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"


def refusals(_: None) -> list[str]:
    """Return the errors of its trainer for the strategy object and for the strategy's name; pytorch_lightning is imported
    after this package, and before it."""
    import lightning_holmes  # noqa: F401  isort: skip
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import StrategyRegistry

    from lightning_holmes import ConfigurationError, HolmesStrategy
    from lightning_holmes.strategy.pytorch_lightning import introduce

    said = []
    for strategy in ("holmes", HolmesStrategy(), "holmes"):
        try:
            pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)  # type: ignore[arg-type]
        except ConfigurationError as error:
            said.append(str(error))
        StrategyRegistry.remove("holmes")
        introduce(HolmesStrategy)
    return said


def test_its_trainer_is_refused_with_what_to_change() -> None:
    (said,) = launch(1, "test_pytorch_lightning:refusals")
    assert len(said) == 3 and all(WORDS in text for text in said)
