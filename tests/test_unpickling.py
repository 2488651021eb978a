"""The places where the package pickles, unpickles, or lets torch do so, each with its reason."""

import ast
import re
from pathlib import Path

from parsing import parsed

import lightning_holmes

PLACES = {
    "checkpoint/torch_file.py: pickle.UnpicklingError": "what torch.load raises",
    "checkpoint/torch_file.py: torch.load": "of files: of plain data only, unless the user says weights_only=False",
    "optim/node/link.py: torch.load": "of messages between a node and its workers: with weights_only=True",
    "models/hf.py: pickle.UnpicklingError": "what torch.load raises",
}
_MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def test_nothing_that_comes_over_the_network_is_unpickled() -> None:
    root = Path(lightning_holmes.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text())):
            names = []
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Import):
                names = [f"{alias.name} as {alias.asname}" for alias in node.names if alias.asname]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                module, _, called = name.rpartition(".")
                objects = called.endswith(("_object", "_object_list")) and "dist" in module
                loads = called == "load" and module in ("torch", "torch.serialization", "torch.jit", "torch.export")
                arrays = called == "load" and module in ("np", "numpy")
                if re.split(r"[ .]", name)[0] in _MODULES or objects or loads or arrays or called == "read_pickle":
                    found.add(f"{path.relative_to(root).as_posix()}: {name}")
    assert found == set(PLACES)
