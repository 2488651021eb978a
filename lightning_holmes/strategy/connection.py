"""Connection: this process's membership in WORLD: how it joins, how failures are watched, and how a broken connection is explained.

    connection = Connection(environment, device, num_nodes=2, options=options)
    connection.open()                            # every rank, when a run begins
    with connection.explaining(): ...            # a lost connection is replaced by the failure that has caused it
    connection.report(error); connection.close()

The process groups inside WORLD are made by job.py; failures are watched by comm/failure.py.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from lightning_holmes.cluster.hardware import HostInventory, probe_host
from lightning_holmes.cluster.inventory import numeric_address
from lightning_holmes.comm.cards import CardWatch
from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.comm.job_store import answer_within
from lightning_holmes.comm.lost import describe_loss, is_lost
from lightning_holmes.comm.objects import all_gather_values, broadcast_value
from lightning_holmes.comm.uncaught import one_line, show_as
from lightning_holmes.comm.user_settings import UserSettings, local_interfaces
from lightning_holmes.comm.world import connect_world, without_interfaces
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError, RemoteError
from lightning_holmes.lightning_package import fabric
from lightning_holmes.lightning_private import default_backend
from lightning_holmes.strategy.options import Options
from lightning_holmes.torch_private import abort_groups, default_store

_ABORT_S = 5.0


class Connection:
    """This process's membership in WORLD.

    Args:
        environment: the cluster environment, which knows the ranks.
        device: the device of this process.
        num_nodes: the number of hosts of the job, as given to the Trainer.
        options: the strategy's arguments.

    Attributes:
        backend: the backend of all process groups for tensors.
        inventory: the hardware of this host; None if all ranks are on one host, or before :meth:`open`.
        user: the settings of communication libraries that the user has made in the environment.
        failed: whether this rank has failed, or ended because another rank has failed, since :meth:`open`; other ranks then do not take part in
            collectives any more.
        told: which rank had failed before, and why, if this rank has ended because of it; else empty.
        watch: communicates with the other ranks outside of collectives; None between runs and after a failure.
        node_watch: watches the job's optimizer nodes and is watched by them, until the end of the job; None without any.
    """

    def __init__(
        self,
        environment: fabric.plugins.environments.cluster_environment.ClusterEnvironment,
        device: torch.device,
        *,
        num_nodes: int,
        options: Options,
    ) -> None:
        self.rank, self.world_size = environment.global_rank(), environment.world_size()
        self.num_nodes = num_nodes
        self.device = device
        self.options = options
        self.backend = default_backend(device) if self.world_size > 1 else "gloo"
        self.inventory: HostInventory | None = None
        self.user = UserSettings()
        self.failed, self.told = False, ""
        self.watch: FailureWatch | None = None
        self.node_watch: FailureWatch | None = None
        self._environment = environment
        self._cards: CardWatch | None = None

    @property
    def master(self) -> str | None:
        """The address of rank 0."""
        return numeric_address(self._environment.main_address)

    def open(self) -> None:
        """Join WORLD, if this process has not joined yet, and watch for failures. Every rank must call.

        Raises:
            ConfigurationError: the settings of this host do not allow it; the other ranks are notified.
        """
        self.failed, self.told = False, ""
        if self.node_watch is not None:
            self.node_watch.ends_process = True
        if self.world_size == 1:
            return
        self.user = UserSettings.read()
        several_hosts = self.num_nodes > 1
        if several_hosts:
            self.inventory = probe_host(master_addr=numeric_address(self._environment.main_address))
        host = socket.gethostname() if self.inventory is None else self.inventory.name
        refusal = None
        try:
            self.user.check_interfaces(self.backend, host=host, interfaces=local_interfaces())
        except ConfigurationError as error:
            refusal = error
        with without_interfaces() if refusal is not None else nullcontext():
            connect_world(
                self._environment,
                self.backend,
                interface=None if self.inventory is None else self.inventory.main_interface,
                several_hosts=several_hosts,
                user=self.user if refusal is None else UserSettings(),
                timeout=self.options.timeout,
            )
        if self.watch is None:
            timeout = self.options.timeout
            self.watch = FailureWatch(
                default_store(), self.rank, self.world_size, None if timeout is None else timeout.total_seconds()
            )
            self.watch.cards = self._cards
        # raised only now, when the watch can notify the other ranks, whose settings may be fine
        if refusal is not None:
            raise refusal

    def watch_cards(self, cards: dict[str, str]) -> None:
        """End the run, in this and later runs, if one of ``cards``, as :class:`CardWatch` takes them, goes down."""
        self._cards = CardWatch(cards) if cards else None
        if self.watch is not None:
            self.watch.cards = self._cards

    def close(self) -> None:
        """Stop watching for failures; WORLD stays, for a later run."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    # Python values over WORLD

    def all_gather(self, value: Any) -> list[Any]:
        """Return ``value`` of each rank, by rank; all ranks must call."""
        return all_gather_values(value)

    def broadcast(self, value: Any) -> Any:
        """Return ``value`` of rank 0; all ranks must call."""
        return broadcast_value(value)

    def ask_rank_0(self, find: Callable[[], Any], *, relays: type[Exception] = HolmesError, helps: bool = False) -> Any:
        """Call ``find`` on rank 0, and return its result on every rank; all ranks must call.

        Args:
            relays: the kind of error of ``find`` that every rank raises, and not rank 0 alone.
            helps: call ``find`` on this rank, too, whose part in the work rank 0 needs.
        """
        answer: tuple[Any, Exception | None] = None, None
        if self.rank == 0 or helps:
            try:
                answer = find(), None
            except relays as refusal:
                answer = None, refusal
        found, error = self.broadcast(answer)
        if error is not None:
            raise error
        return found

    # failures

    @contextmanager
    def explaining(self, where: Callable[[], str] | None = None) -> Generator[None, None, None]:
        """Inside, replace the error of a broken connection by the failure of the rank that broke it, or name the group that was used.

        Args:
            where: returns a description of the group; None before there are groups.

        Raises:
            ConnectionLostError: a connection was lost, and no rank has reported why.
        """
        try:
            yield
        except Exception as exception:
            cause = exception if self.watch is None else self.watch.explain(exception)
            stall = "" if self.watch is None else self.watch.stall()
            if cause is not exception:
                raise cause from None
            if isinstance(exception, ConnectionLostError) and stall and stall not in str(exception):
                exception.args = (f"{exception}. {stall}",)
            if isinstance(exception, HolmesError) or not is_lost(exception):
                raise
            group = "the group of all ranks" if where is None else where()
            words = describe_loss(f"on rank {self.rank} in {group}", exception)
            if where is None:  # nothing has been sent yet
                words += ". Before the first step, `lightning-holmes topology` under torchrun tries every connection between the hosts"
            raise ConnectionLostError(f"{words}. {stall}" if stall else words) from exception

    def report(self, exception: BaseException, explaining: Callable[[], AbstractContextManager[None]]) -> None:
        """Report to the other ranks that this one has failed, and why; ``explaining`` replaces the exception by its cause."""
        self.failed = True
        said = exception
        if isinstance(exception, Exception) and not isinstance(exception, HolmesError):
            try:
                with explaining():  # the failure may be in a collective of Lightning's or of a hook
                    raise exception
            except HolmesError as explained:
                said = explained
            except Exception:
                pass
        if self.node_watch is not None:
            self.node_watch.ends_process = False  # it ends by itself, and may save before
        if self.watch is None:
            return
        self.told = str(said) if isinstance(said, RemoteError) else ""
        first = self.watch.report(said)
        self.watch = None
        if self.backend == "nccl":  # kernels that wait for a lost rank would keep this process from ending
            with suppress(Exception):
                answer_within(abort_groups, timeout_s=_ABORT_S)
        line = f"[rank {self.rank}] {one_line(said)}"
        if isinstance(said, KeyboardInterrupt):
            if self.rank:  # on rank 0 Lightning prints it, and ends the process by sys.exit
                print(line, file=sys.stderr, flush=True)
        elif first is not None and first.rank != self.rank:
            own, others = one_line(said), first.words.splitlines()[0]
            line = first.line(f"rank {self.rank}")
            if own == others and isinstance(said, HolmesError) and self.num_nodes == 1:
                line = f"[rank {self.rank}] ends with the same {type(said).__name__} as rank {first.rank}"
            elif own != others and not isinstance(said, RemoteError):
                line = f"{line}; here {own}"
            show_as(exception, line)
        elif first is None and isinstance(said, HolmesError) and is_lost(said):
            show_as(exception, line)  # no other rank answers: this line says more than the traceback
        elif said is not exception:
            print(line, file=sys.stderr, flush=True)
