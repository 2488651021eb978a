"""The data modules of the recipes: bytes of files, memory-mapped token files, and Hugging Face data sets on disk."""

from lightning_holmes.comm.coordinate import data_parallel_coordinate
from lightning_holmes.data.bytes import FileBytes
from lightning_holmes.data.saved import SavedDataset
from lightning_holmes.data.tokens import TokenFile

__all__ = ["FileBytes", "SavedDataset", "TokenFile", "data_parallel_coordinate"]
