"""lightning-holmes optimizer-node -- SCRIPT: runs an optimizer node of a job on this host. The job runs the same script.

    HOLMES_NODE_SECRET=... lightning-holmes optimizer-node --master-addr 10.0.0.1 -- train.py --epochs 3

The script runs up to its first fit, validate, test or predict, which does not return in this process: from then on the process holds
parameters and optimizer states of the job, and it ends with the job. The script is run only so that the optimizer's class is defined here;
its Trainer is built for one CPU, whatever its arguments are. Start the workers as usual, with HolmesStrategy(optimizer_nodes=K) and the
same HOLMES_NODE_SECRET; rank 0 waits for K nodes.
"""

import argparse
import functools
import os
import runpy
import sys
from typing import NoReturn
from urllib.parse import urlsplit

from lightning_holmes.errors import ConfigurationError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import build_trainers_for_one_cpu
from lightning_holmes.optim.node.node_options import MEMORY, NodeOptions
from lightning_holmes.optim.node.role import DEFAULT_PORT, PORT, SECRET, join


def main(args: list[str]) -> None:
    """Run the command; it ends the process.

    Raises:
        ConfigurationError: there is no secret, no script, or the script has ended before it came to a fit.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-holmes optimizer-node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--master-addr",
        default=os.environ.get("MASTER_ADDR"),
        help="the host of rank 0; several hosts, separated by commas, if rank 0 may be on any of them; default MASTER_ADDR",
    )
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST[:PORT]", help="torchrun's option; its host is used instead of --master-addr"
    )
    parser.add_argument("--master-port", type=int, help="torchrun's; ignored with a note: nodes connect to --port")
    parser.add_argument(
        "--port",
        type=int,
        default=int(os.environ.get(PORT, DEFAULT_PORT)),
        help=f"the port on which rank 0 waits for nodes; default: the environment variable {PORT}, or {DEFAULT_PORT}",
    )
    parser.add_argument("--wait", type=float, default=1800.0, help="seconds to wait for rank 0; default 1800")
    parser.add_argument(
        "--states",
        metavar="FOLDER",
        help="where parameters and optimizer states are kept; default: the script's optimizer_states",
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help=f"the most memory of this process, such as 8G; default: the environment variable {MEMORY}; without it 0.8 of the host's free "
        "memory if states are on disk, and no limit if they are in memory",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ...",
        help="the script and its arguments, as the workers run it",
    )
    given = parser.parse_args(args)
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    if not script:
        raise ConfigurationError("there is no script: write -- and the script, with its arguments, as workers run it")
    endpoint = urlsplit(f"//{given.rdzv_endpoint or ''}")
    address, of_job = endpoint.hostname or given.master_addr, endpoint.port or given.master_port
    if address is None:
        raise ConfigurationError("--master-addr is not given, and MASTER_ADDR is not set: name the host of rank 0")
    if of_job is not None:
        print(
            f"rank 0 is looked for at {address}, port {given.port} (--port, {PORT}), where it waits for nodes; the job's own port "
            f"{of_job} is not used",
            flush=True,
        )
    if not os.environ.get(SECRET):
        raise ConfigurationError(f"{SECRET} is not set: give the same secret to workers and nodes")

    options = NodeOptions.given(given.states, given.memory)

    def serve() -> NoReturn:
        code = join(
            [(each.strip(), given.port) for each in address.split(",")],
            -1,
            may_import=False,
            options=options,
            wait_s=given.wait,
        )
        sys.stdout.flush()
        os._exit(code)  # the script does not continue, and threads that serve workers are not joined

    build_trainers_for_one_cpu()
    for name in ("fit", "validate", "test", "predict"):
        setattr(pl.Trainer, name, functools.wraps(getattr(pl.Trainer, name))(lambda *_, **__: serve()))
    sys.argv[:] = script
    sys.path.insert(0, os.path.dirname(os.path.abspath(script[0])))
    runpy.run_path(script[0], run_name="__main__")
    raise ConfigurationError(f"{script[0]} has ended, and called no Trainer.fit, validate, test or predict")
