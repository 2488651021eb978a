"""lightning-holmes: the command line. LightningCLI with fit, validate, test and predict, `check` and `plan`.

This module owns the parser and the display of errors; the commands are implemented by Lightning and `lightning_holmes.check`.

    lightning-holmes fit --config recipes/gpt_tiny/config.yaml
    lightning-holmes check --config recipes/gpt_tiny/config.yaml

`check` reads the same config files as `fit`. It makes the model and one batch of the data module, and compares the
pipeline with the plain module in one process; of the trainer's settings it reads only the strategy. It exits with 0 if
everything agrees and with 1 if something differs.

    lightning-holmes plan --config recipes/gpt_tiny/config.yaml --device_type A100-80GB --plot step.png

`plan` reads the same files and predicts what a run will cost before it is started, without GPUs, weights or network
(commands/plan_command.py).

Classes that a config file names are also found in the working folder. Errors in the user's input are printed as one message, without a traceback; the exit code is then 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace  # type: ignore[attr-defined]

import lightning_holmes  # noqa: F401 - registers the strategy "holmes"
from lightning_holmes.checkpoint import load_whole_state, read_state_dict
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.uncaught import line_of
from lightning_holmes.commands import COMMANDS, refuse_removed, run_command
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.lightning_package import USED, fabric, pl
from lightning_holmes.lightning_private import config_value
from lightning_holmes.loggers import RunRecord
from lightning_holmes.plan.asked import AskedSharding
from lightning_holmes.strategy.removed_arguments import tell_removed

CHECK, PLAN = "check", "plan"

# HolmesStrategy's arguments that check takes too, with check's own defaults.
_CHECK_DEFAULTS: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "num_chunks": 1,
    "layers": "auto",
    "partition": "uniform",
}


class HolmesParser(pl.cli.LightningArgumentParser):
    """LightningCLI's parser, which refuses arguments that HolmesStrategy had in an earlier version by name, wherever they are given."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.findall(r"Option '(\w+)' is not accepted", message)
        if message.startswith("unrecognized arguments:"):
            unknown += re.findall(r"--(?:[\w.]+\.)?(\w+)", message)
        gone = tell_removed(unknown)
        # else this parser reads a part of a value, and its message comes to the one that exits
        if gone and self.exit_on_error:
            raise ConfigurationError("; ".join(gone)) from ex
        super().error(message, ex)


class HolmesTrainer(pl.Trainer):
    """Lightning's Trainer; `check` and `plan` are methods here because LightningCLI makes its subcommands from methods."""

    def check(
        self,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Compare the pipeline with the plain module, in one process and on one batch.

        Args:
            pipeline_parallel_size: Number of stages; by default the strategy's, or 2.
            num_microbatches: Microbatches the batch is split into; by default the strategy's, or 2.
            schedule: The order of forwards and backwards; by default the strategy's, or "1f1b".
            ckpt_path: A checkpoint, file or folder, whose weights the module gets first; by default its fresh weights.
            weights_only: As in fit; false unpickles a checkpoint that you trust.
        """
        raise NotImplementedError("HolmesCLI runs check without a trainer")

    def plan(
        self,
        topology: str | None = None,
        device_type: str | None = None,
        batch_shape: str | None = None,
        batch_samples: int | None = None,
        tensor_parallel_sizes: list[int] | None = None,
        sharding: AskedSharding | None = None,
        sequence_parallel: bool = False,
        plot: str | None = None,
        output: str | None = None,
        format: Literal["table", "json"] = "table",
    ) -> None:
        """Predict the fastest plans of a run, without GPUs, weights or network.

        Args:
            topology: A topology file; by default the strategy's.
            device_type: A known type (A100-80GB), numbers ("speed=100e12,memory=40e9"), or "here" for this machine's speed, measured
                briefly. A host's own device_type in the topology file takes precedence.
            batch_shape: The batch of one replica instead of the data module's, as in
                input_ids=4x2048:int64,labels=4x2048:int64.
            batch_samples: Samples of a step over all replicas; by default as many as in fit.
            tensor_parallel_sizes: Sizes to try, for modules that support tensor parallelism; by default 1.
            sharding: What is sharded over replicas; by default the strategy's argument.
            sequence_parallel: The module's tensor-parallel ranks also shard the activations between their parallel layers.
            plot: A .png or .svg file for the timeline of the best plan's step.
            output: A plan file of the best plan, for HolmesStrategy(plan=...).
            format: What is printed: a table or JSON.
        """
        raise NotImplementedError("HolmesCLI runs plan without a trainer")


class RecordedConfig(pl.cli.SaveConfigCallback):
    """Save the configuration of a fit as Lightning does, and record it and the plan in the loggers."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # a validation must not overwrite the configuration that the run was trained with
        given = {Path(str(path)).resolve() for path in self.config.get("config") or ()}
        # without a logger: the working folder
        if Path(trainer.log_dir or ".", self.config_filename).resolve() not in given:
            super().setup(trainer, pl_module, stage)
        self._record = RunRecord(config=yaml.safe_load(self.parser.dump(self.config, skip_unset=False)))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record.on_fit_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        self._record.on_train_batch_end(trainer, pl_module, *batch)


class HolmesCLI(pl.cli.LightningCLI):
    """LightningCLI with the subcommands `check` and `plan`. If the first argument is a subcommand, as in `fit --config ...`, only
    that subcommand's options are collected: collecting them takes half a second per subcommand."""

    def __init__(self, args: list[str] | None, **options: Any) -> None:
        first = next(iter(sys.argv[1:] if args is None else args), None)
        self._asked_for = first if first in self.subcommands() else None
        super().__init__(args=args, **options)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**pl.cli.LightningCLI.subcommands(), CHECK: set(), PLAN: set()}

    def init_parser(self, **kwargs: Any) -> pl.cli.LightningArgumentParser:
        kwargs.setdefault("dump_header", [f"{pl.__name__}=={version(USED)}"])
        parser = HolmesParser(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a configuration file, YAML or JSON")
        return parser

    def _add_subcommands(self, parser: Any, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        for name, (_, text) in COMMANDS.items():  # main runs them; they are added here for --help
            parser._subcommands_action.add_subcommand(name, ArgumentParser(description=text), help=text)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> pl.cli.LightningArgumentParser:
        if self._asked_for in (None, subcommand):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.init_parser(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the model is built from the configuration only. Lightning would let the hyper-parameters of a checkpoint
        file override the configuration and the command line: a new learning rate for the resumed run would be ignored."""

    def instantiate_classes(self) -> None:
        if self.subcommand == PLAN:
            return  # run_plan makes the module later, so that its weights take no memory
        if self.subcommand != CHECK:
            super().instantiate_classes()
            return
        # check does not need the trainer, its loggers, devices or callbacks, so none of them is made
        self.strategy_args = make_strategy_args(self.config[CHECK].trainer.strategy)
        self.config_init = self.parser.instantiate_classes(self._without_trainer(CHECK))
        self.datamodule = config_value(self, self.config_init, "data")
        self.model = config_value(self, self.config_init, "model")

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == CHECK:
            self.run_check()
        elif subcommand == PLAN:
            self.run_plan()
        else:
            super()._run_subcommand(subcommand)

    def run_check(self) -> None:
        options = self.config_init[CHECK]
        arguments = {**_CHECK_DEFAULTS, **self.strategy_args}
        own = ("pipeline_parallel_size", "num_microbatches", "schedule")
        arguments |= {name: options[name] for name in own if options[name] is not None}
        if options["ckpt_path"] is not None:
            path = Path(options["ckpt_path"])
            if not path.exists():
                raise ConfigurationError(f"ckpt_path={str(path)!r}: there is no such checkpoint, file or folder.")
            self.model.configure_model()  # as a trainer would do, even if __init__ has built the layers
            load_whole_state(self.model, read_state_dict(path, weights_only=options["weights_only"] is not False))
        shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
        print(f"check: one batch, one process, {shown}")
        from lightning_holmes import check  # not needed, and so not loaded, by the other commands

        report = check(self.model, self.load_batch(), **arguments)
        report.print()
        if not report.ok:
            sys.exit(1)

    def run_plan(self) -> None:
        from lightning_holmes.commands import plan_command  # not needed, and so not loaded, by the other commands

        options = self.config[PLAN]
        given = {entry.name: options[entry.name] for entry in fields(plan_command.PlanRequest)}
        given["tensor_parallel_sizes"] = tuple(given["tensor_parallel_sizes"] or (1,))
        for name in ("plot", "output"):
            plan_command.check_writable(given[name], f"--{name}")
        self.datamodule = self._make_only("data")

        def load_batch(model: pl.LightningModule) -> Any:
            self.model = model
            return self.load_batch()

        result = plan_command.run_plan(
            plan_command.PlanRequest(**given),
            build_model=lambda: self._make_only("model"),
            load_batch=load_batch if self.datamodule is not None else None,
            strategy=options.trainer.strategy,
            trainer=options.trainer,
        )
        if result.fits_no_optimizer:
            sys.exit(1)

    def _without_trainer(self, subcommand: str) -> Any:
        """The configuration without the objects that a Trainer would be made with."""
        config = self.config.clone()
        for name in ("strategy", "logger", "callbacks", "plugins", "profiler"):
            config[subcommand].trainer[name] = None if name != "strategy" else "auto"
        return config

    def _make_only(self, part: str) -> Any:
        """The module or the data module alone; None if there is none."""
        config = self._without_trainer(PLAN)
        config[PLAN]["data" if part == "model" else "model"] = None
        if config[PLAN].get(part) is None:
            return None
        return config_value(self, self.parser.instantiate_classes(config), part)

    def load_batch(self) -> Any:
        """The first training batch, of the data module or of the model's own loader."""
        source: pl.LightningDataModule | pl.LightningModule = self.datamodule or self.model
        source.prepare_data()
        source.setup("fit")
        return next(iter(source.train_dataloader()))


def make_strategy_args(strategy: Any) -> dict[str, Any]:
    """The arguments for check from a trainer's strategy setting, without those that are "auto".

    `strategy` is the parsed setting: a name, or a Namespace with class_path and init_args. If the topology file has
    several clusters, the automatic number of stages is the number of clusters, as in fit.
    """
    is_class = isinstance(strategy, Namespace | Mapping)
    if not is_class or str(strategy["class_path"]).rpartition(".")[2] != "HolmesStrategy":
        return {}
    given = strategy.get("init_args") or {}
    arguments = {name: given[name] for name in _CHECK_DEFAULTS if name in given and given[name] != "auto"}
    topology = given.get("topology", "auto")
    if "pipeline_parallel_size" not in arguments and isinstance(topology, str) and topology != "auto":
        num_clusters = len(Topology.from_yaml(topology).clusters)
        if num_clusters > 1:
            arguments["pipeline_parallel_size"] = num_clusters
    return arguments


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; `args` default to those of the process."""
    given = list(args) if args is not None else sys.argv[1:]
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does: a config file's classes may be in the working folder
    try:
        refuse_removed(given)
        if given and given[0] in COMMANDS:
            run_command(given[0], given[1:])
            return
        HolmesCLI(
            trainer_class=HolmesTrainer,
            save_config_callback=RecordedConfig,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "lightning-holmes",
                "version": version("lightning-holmes"),
                "description": "Train LightningModules as a pipeline across clusters.",
                # the default usage would list all options before an error message and again before the help text
                **{
                    name: {"usage": f"lightning-holmes {name} --config CONFIG [options]"}
                    for name in HolmesCLI.subcommands()
                },
            },
            auto_configure_optimizers=False,
            args=None if args is None else given,
        )
    except Exception as error:
        shown: BaseException | None = error
        users = HolmesError | fabric.utilities.exceptions.MisconfigurationException
        while shown is not None and not isinstance(shown, users):
            shown = shown.__cause__  # jsonargparse wraps the exceptions of constructors
        if shown is None:
            raise
        if (line := line_of(error)) is not None:
            print(line, file=sys.stderr)
            sys.exit(2)
        rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID")
        prefix = f"[rank {rank}] " if rank not in (None, "0") else ""
        print(f"{prefix}lightning-holmes: {type(shown).__name__}: {shown}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
