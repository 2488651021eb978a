"""How a process joins its job: ranks, connection, topology, groups; and what broke, when a connection breaks.

A base of HolmesStrategy; what is laid out is job_layout.py's, what waits for failures comm/failure.py's.
"""

import functools
import gc
import socket
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch.distributed.device_mesh import DeviceMesh

from lightning_holmes.cluster.hardware import HostInventory, probe_host
from lightning_holmes.cluster.inventory import numeric_address
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.comm.failure import FailureWatch
from lightning_holmes.comm.lost import describe_loss, is_lost
from lightning_holmes.comm.mesh import ProcessGroups, release
from lightning_holmes.comm.reach import announce, gather_blocked, tell_blocked
from lightning_holmes.comm.user_settings import UserSettings, local_interfaces
from lightning_holmes.comm.world import check_port_range, connect_world, without_interfaces
from lightning_holmes.errors import ConfigurationError, ConnectionLostError, HolmesError, UnreachableError
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.plan_options import PlanOptions
from lightning_holmes.strategy import agreement
from lightning_holmes.strategy.collectives import ReplicaCollectives
from lightning_holmes.strategy.job_layout import Job, JobLayout, build_device_mesh, find_topology, lay_out_job
from lightning_holmes.strategy.options import Options
from lightning_holmes.torch_private import default_store


class JoiningStrategy(ReplicaCollectives):
    """The processes of a strategy, from the launcher to process groups."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._process_group_backend = options.process_group_backend
        self._num_nodes = 1
        self._inventory: HostInventory | None = None
        self._user_settings = UserSettings()
        self._layout: JobLayout | None = None
        self._placement: Placement | None = None
        self._groups: ProcessGroups | None = None
        self._device_mesh: DeviceMesh | None = None
        self._watch: FailureWatch | None = None
        self._failed = False

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall inject distributed samplers and reduce logged values: where there are replicas.

        A pipeline alone reads its data and logs as one process does.
        """
        return self.data_parallel_size > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Hosts of the job, as given to the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of tensors' groups; None until chosen."""
        return self._process_group_backend

    @property
    def data_parallel_rank(self) -> int:
        """This rank's coordinate among the replicas: what decides which samples it loads."""
        return 0 if self._groups is None else self._groups.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return 1 if self._placement is None else self._placement.data_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank, as Lightning's strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # joining

    def setup_environment(self) -> None:
        # no reset_seed() as in DDP: random numbers go on as in plain Lightning, and share_random_state aligns stages
        # Remains of an earlier run: a forked data worker that collects its groups waits for threads that it has not.
        gc.collect()
        super().setup_environment()
        self.set_world_ranks()
        self._failed = False
        if self.world_size > 1:
            self._connect()
        with self._explaining():
            self._lay_out()
        publish_coordinate((self.data_parallel_rank, self.data_parallel_size))

    def _connect(self) -> None:
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        if backend == "gloo" and self.root_device.type == "cuda":
            raise ConfigurationError(
                'process_group_backend="gloo" cannot send tensors between CUDA devices; use "nccl" or leave it out'
            )
        self._process_group_backend = backend
        environment = self.cluster_environment
        assert environment is not None
        self._user_settings = UserSettings.read()
        several_hosts = self.num_nodes > 1
        if several_hosts:
            self._inventory = probe_host(master_addr=numeric_address(environment.main_address))
        host = socket.gethostname() if self._inventory is None else self._inventory.name
        refusal = self._refusal_of_this_host(backend, host)
        is_first = not torch.distributed.is_initialized()
        with without_interfaces() if refusal is not None else nullcontext():
            connect_world(
                environment,
                backend,
                interface=None if self._inventory is None else self._inventory.main_interface,
                several_hosts=several_hosts,
                user=self._user_settings if refusal is None else UserSettings(),
                timeout=self._options.timeout,
            )
        if several_hosts and is_first:
            announce(default_store(), rank=self.global_rank, host=host)
        if self._watch is None:
            self._watch = FailureWatch(default_store(), self.global_rank, self.world_size)
            self._watch.on_doubt = functools.partial(tell_blocked, rank=self.global_rank, world_size=self.world_size)
        if refusal is not None:  # now that the others, which may have nothing to refuse, will be told
            raise refusal

    def _refusal_of_this_host(self, backend: str, host: str) -> ConfigurationError | None:
        """What is wrong with the settings of this host alone, as other hosts cannot know."""
        try:
            if self._inventory is not None and self._options.ports is not None:
                check_port_range(self._options.ports)
            self._user_settings.check_interfaces(backend, host=host, interfaces=local_interfaces())
        except ConfigurationError as refusal:
            return refusal
        return None

    def _lay_out(self) -> None:
        """Topology, placement and process groups: all that does not depend on the module."""
        if self._layout is None:
            asked = self._options.plan_options
            job = Job(
                rank=self.global_rank,
                world_size=self.world_size,
                num_nodes=self.num_nodes,
                backend=self._process_group_backend or "gloo",
                device=self.root_device,
                timeout=self._options.timeout,
                port_range=self._options.ports,
                inventory=self._inventory,
                user=self._user_settings,
                # groups are laid out without speeds; what is chosen by predicted cost needs them
                measures_links=asked.leaves_open and asked.pipeline_parallel_size != 1,
            )
            topology = find_topology(self._options.topology, job)
            self._check_given_plan(topology)
            self._layout = lay_out_job(
                topology,
                pipeline_parallel_size=asked.pipeline_parallel_size,
                tensor_parallel_size=asked.tensor_parallel_size,
                num_chunks=asked.num_chunks,
                largest_num_chunks=asked.largest_num_chunks,
                schedule=asked.schedule,
                job=job,
                facts=self._argument_facts(topology),
                activation_dtype=self._options.sent_dtype,
            )
            self._placement, self._groups = self._layout.placement, self._layout.groups
            if self._watch is not None:
                self._watch.on_doubt = None
            # not at teardown: metrics and checkpoints use them after a run
            weakref.finalize(self, release, self._layout.groups.builder.owned).atexit = False
            if self.world_size > 1:
                self._device_mesh = build_device_mesh(self._layout, self.root_device.type)
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    def _check_given_plan(self, topology: Topology) -> None:
        """Refuse a topology that a given plan was not made for."""

    @property
    def plan_options(self) -> PlanOptions:
        """What the arguments, or a plan file, ask for of what a plan decides."""
        return self._options.plan_options

    def _argument_facts(self, topology: Topology) -> dict[str, str]:
        """Versions and arguments: compared before groups are built, which differing ones would make hang."""
        chosen = {"topology": topology.to_yaml(), "process_group_backend": self._process_group_backend}
        arguments = self._options.arguments() | chosen
        return agreement.version_facts() | {f"HolmesStrategy({n}=)": repr(v) for n, v in arguments.items()}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks by the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``; a LightningModule reads it as
        ``self.device_mesh``.

        Known from ``configure_model`` on, where there is more than one process.
        """
        if self._device_mesh is None:
            raise HolmesError("the device mesh is made when the trainer sets up several processes; ask for it later")
        return self._device_mesh

    # failures

    @contextmanager
    def _explaining(self, group: Any = None) -> Generator[None, None, None]:
        """Replace a broken connection by the failure of the rank that broke it, or name ``group`` (None: all ranks), which
        is the one used inside where nothing has named another."""
        try:
            yield
        except Exception as exception:
            cause = exception if self._watch is None else self._watch.explain(exception)
            if cause is not exception:
                raise cause from None
            if isinstance(exception, HolmesError) or not is_lost(exception):
                raise
            if self._groups is None:
                if not self._failed:
                    self._explain_blocked(exception)
                raise
            where = f"on rank {self.global_rank} in {self._groups.builder.describe(group)}"
            raise ConnectionLostError(describe_loss(where, exception)) from exception

    def _explain_blocked(self, exception: Exception) -> None:
        """Raise what is known of connections that cannot be made, where WORLD has failed before there are other groups."""
        if self._watch is None or self.num_nodes == 1:
            return
        self._watch.doubt()
        blocked = gather_blocked(default_store(), world_size=self.world_size)
        if blocked:
            raise UnreachableError(
                f"the group of all ranks cannot be connected: {'; '.join(blocked[:8])}. The library says: "
                f"{str(exception).splitlines()[0]}. If a firewall lies between them, open the ports and give port_range"
            ) from exception

    @property
    def _replicas(self) -> Any:
        """The group of this rank's replicas, or None."""
        return None if self._groups is None else self._groups.data_parallel

    def barrier(self, name: str | None = None) -> None:
        if not self._failed:  # callbacks may still save, but the other ranks do not come any more
            super().barrier(name)

    def _report(self, exception: BaseException) -> None:
        """Tell the other ranks that this one has failed, and why."""
        self._failed = True
        if isinstance(exception, Exception) and not isinstance(exception, HolmesError):
            try:
                with self._explaining():  # what broke in Lightning's own collectives, or a hook's
                    raise exception
            except HolmesError as explained:
                print(f"[rank {self.global_rank}] {type(explained).__name__}: {explained}", file=sys.stderr, flush=True)
                exception = explained
            except Exception:
                pass
        if self._watch is not None:
            self._watch.report(exception)
            self._watch = None

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
