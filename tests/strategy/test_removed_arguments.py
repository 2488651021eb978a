"""Arguments that are gone are refused by name, with what to do instead; nothing that HolmesStrategy takes is among them."""

import inspect
from pathlib import Path

import pytest

from lightning_holmes import ConfigurationError, HolmesStrategy
from lightning_holmes.cli import main
from lightning_holmes.strategy.removed_arguments import REMOVED, tell_removed


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_an_argument_that_is_gone_is_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}=True: this argument is gone; .") as caught:
        HolmesStrategy(**{name: True})
    assert REMOVED[name] in str(caught.value)


@pytest.mark.parametrize("command", ["fit", "check", "plan"])
def test_config_files_and_the_command_line_refuse_it_likewise(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer: {strategy: {class_path: lightning_holmes.HolmesStrategy, init_args: {sharded_optimizer: true}}}"
    )
    model = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
    gone = "trainer.strategy.init_args.sharded_optimizer"
    named = [[f"--config={path}"], ["--trainer.strategy=lightning_holmes.HolmesStrategy", f"--{gone}=true"]]
    for given in named + [["--sharded_optimizer=true"]] * (command != "fit"):
        with pytest.raises(SystemExit) as ended:
            main([command, model, *given])
        told = capsys.readouterr().err
        assert ended.value.code == 2, told
        assert told == f"lightning-holmes: ConfigurationError: {tell_removed(['sharded_optimizer'])[0]}\n"


def test_no_argument_is_both_taken_and_gone() -> None:
    taken = set(inspect.signature(HolmesStrategy.__init__).parameters)
    assert "topology" in taken
    assert not taken & set(REMOVED)


def test_an_unknown_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unknown_argument"):
        HolmesStrategy(unknown_argument=1)


def test_every_argument_has_a_row_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "arguments.md").read_text(encoding="utf-8")
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert set(inspect.signature(HolmesStrategy.__init__).parameters) - {"self"} <= documented
