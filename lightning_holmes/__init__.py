"""Train an ordinary LightningModule as a pipeline across clusters whose network cards differ.

Importing this package registers the strategy and lets Lightning read the checkpoint folders that the strategy writes::

    import lightning_holmes
    Trainer(strategy="holmes", devices=4)
    MyModule.load_from_checkpoint("lightning_logs/version_0/checkpoints/epoch=0-step=8.ckpt")
"""

from lightning_holmes.checking.check_report import CheckReport
from lightning_holmes.checking.simulated_pipeline import check
from lightning_holmes.checkpoint.converting import read_whole
from lightning_holmes.checkpoint.finding import is_folder
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import (
    AbsentValueError,
    ConfigurationError,
    HolmesError,
    RemoteError,
    UnsupportedModuleError,
)
from lightning_holmes.lightning_package import introduce
from lightning_holmes.lightning_private import read_folders
from lightning_holmes.plan.plan import Plan
from lightning_holmes.strategy import HolmesStrategy
from lightning_holmes.version import __version__

introduce(HolmesStrategy)
read_folders(is_folder, read_whole)

__all__ = [
    "AbsentValueError",
    "CheckReport",
    "ConfigurationError",
    "HolmesError",
    "HolmesStrategy",
    "Plan",
    "RemoteError",
    "Topology",
    "UnsupportedModuleError",
    "__version__",
    "check",
]
