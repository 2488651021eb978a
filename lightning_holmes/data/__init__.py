"""What the recipes train on: bytes of files and memory-mapped token files."""

from lightning_holmes.data.bytes import FileBytes
from lightning_holmes.data.tokens import TokenFile

__all__ = ["FileBytes", "TokenFile"]
