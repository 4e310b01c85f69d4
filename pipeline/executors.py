"""Who does the work of a job that is split into claims: one process, processes of any launcher, or Ray actors.

All of them take their pieces from one folder and write their results into it (``pipeline.claims``), so they differ only
in how workers come to be. One, the leader, prepares the folder and publishes the results; it sees a job through
whatever happens to the others. If the leader itself dies, the same command goes on with what is there.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.claims import LOOK_SECONDS, Claims, Share
from pipeline.progress import log
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig

LEADER_SECONDS = 600.0  # a worker waits so long for the leader to begin: a cold start of a large installation
CONNECT_SECONDS = 10.0
LATE_SECONDS = 60.0  # the leader, done, waits so long for workers that have not come yet, lest they wait for it


class Job(Protocol):
    """Work that is done piece by piece; all workers have an equal job (Ray sends it to them)."""

    @property
    def config(self) -> "PairConfig":
        """The pair's configuration."""

    @property
    def scratch(self) -> Path:
        """Folder of the half-done work; it holds a folder ``claims`` once the leader has begun."""

    def begin(self) -> None:
        """Make ``scratch`` ready and remove what other jobs left."""

    def work(self, share: Share, device: str, *, shown: bool) -> None:
        """Do all pieces that ``share`` gives, and return when every piece is done."""

    def publish(self) -> None:
        """Put the results in their place."""

    def retire(self) -> None:
        """Note that all is done and remove ``scratch``."""


def execute(job: Job) -> None:
    """Do ``job`` as ``label.executor`` says."""
    {"local": run_local, "torchrun": run_torchrun, "ray": run_ray}[job.config.label.executor](job)


def run_local(job: Job) -> None:
    """All in this process."""
    job.begin()
    job.work(Claims(job.scratch / "claims"), job.config.device, shown=True)
    job.publish()
    job.retire()


def run_torchrun(job: Job) -> None:
    """One of WORLD_SIZE processes; that of RANK 0 leads and publishes."""
    rank, world = read_rank()
    device = _device_of_rank(job.config)
    arrivals = job.scratch / "claims"
    if rank > 0:
        _await_leader(arrivals)
        with _may_vanish(job.scratch):
            (arrivals / f"arrived-{rank}").touch()
            job.work(Claims(arrivals), device, shown=False)
            (arrivals / f"arrived-{rank}").touch()  # once more: a leader that began later has taken it for an old one
        return
    job.begin()
    job.work(Claims(arrivals), device, shown=True)
    job.publish()
    deadline = time.monotonic() + LATE_SECONDS
    while not all((arrivals / f"arrived-{other}").exists() for other in range(1, world)):
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    job.retire()


def read_rank() -> tuple[int, int]:
    """RANK and WORLD_SIZE; UserError where they are missing or make no sense."""
    numbers = []
    for name in ("RANK", "WORLD_SIZE"):
        text = os.environ.get(name)
        if text is None:
            raise UserError(
                f"label.executor is torchrun, but {name} is not set: start the workers with torchrun, or set RANK and "
                "WORLD_SIZE in the environment of each."
            )
        if not text.isdecimal():
            raise UserError(f'{name} must be a whole number of at least 0, not "{text}".')
        numbers.append(int(text))
    rank, world = numbers
    if rank >= world:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks go from 0 to WORLD_SIZE - 1.")
    return rank, world


def _device_of_rank(config: "PairConfig") -> str:
    """Each process of a machine gets a GPU of its own where the launcher says which of them it is (LOCAL_RANK)."""
    local = os.environ.get("LOCAL_RANK", "")
    if config.device in ("auto", "cuda") and config.device_map is None and local.isdecimal():
        import torch

        if torch.cuda.is_available():
            return f"cuda:{int(local) % torch.cuda.device_count()}"
    return config.device


def _await_leader(folder: Path) -> None:
    deadline = time.monotonic() + LEADER_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise UserError(
                f"The worker of RANK 0 has not begun this work within {LEADER_SECONDS:.0f} s, or had ended before: "
                "start all workers in one shared folder with the same models, parameters and code."
            )
        time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _may_vanish(scratch: Path) -> Iterator[None]:
    """The leader removes ``scratch`` when all is published; a worker that still looks into it is through, too."""
    try:
        yield
    except FileNotFoundError:
        if scratch.exists():
            raise


def run_ray(job: Job) -> None:
    """``label.workers`` actors do the work, each on a device of its own; this process watches and publishes."""
    ray = _import_ray()
    config = job.config
    if ":" in config.device:
        raise UserError(
            f"Ray gives every actor a device of its own: set device to auto, cpu or cuda, not {config.device}."
        )
    _connect(ray, config.label.workers)
    try:
        job.begin()
        actor = ray.remote(_Actor).options(num_gpus=_gpus_of_an_actor(ray, config))
        actors = [actor.remote(str(Path.cwd())) for _ in range(config.label.workers)]
        job.work(_Onlooker(ray, [each.work.remote(job) for each in actors]), config.device, shown=True)
    finally:
        ray.shutdown()
    job.publish()
    job.retire()


class _Actor:
    """A Ray actor: one worker. All machines see the folder that the job was started in under the same name."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def work(self, job: Job) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{socket.gethostname()} has no folder {self.folder}: all machines must share it.")
        os.chdir(self.folder)
        with _may_vanish(job.scratch):
            job.work(Claims(job.scratch / "claims"), job.config.device, shown=False)


class _Onlooker:
    """The share of a process that takes nothing and watches Ray's actors."""

    def __init__(self, ray: Any, running: list[Any]) -> None:
        self.ray = ray
        self.running = running
        self.survivors = len(running)

    def take(self, name: str) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(False)

    def wait(self) -> None:
        """Raises UserError for a worker's own UserError, and when no actor is left."""
        if not self.running:  # all have ended, and a network file system may show their last files a little later
            time.sleep(LOOK_SECONDS)
            return
        ended, self.running = self.ray.wait(self.running, timeout=LOOK_SECONDS)
        for result in ended:
            try:
                self.ray.get(result)
            except self.ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise
            except self.ray.exceptions.RayActorError:
                self.survivors -= 1
                log(f"label: a Ray actor has died; {self.survivors} left, which take over what it held")
        if not self.survivors:
            raise UserError("All Ray actors have died; what they finished is kept: run the same command again.")


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("label.executor is ray, but Ray is not installed: pip install 'treegraft[ray]'.") from None
    return ray


def _connect(ray: Any, workers: int) -> None:
    """To the cluster that RAY_ADDRESS names, or to one of this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing reports home
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        cores = max(workers, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level="warning")
        return
    try:
        if ":" in address:  # asked for here, because Ray itself goes on trying for many minutes
            host, port = address.rpartition("://")[2].rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, logging_level="warning")
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        raise UserError(
            f"The Ray cluster at RAY_ADDRESS {address} cannot be reached ({error}); one that asks for a token needs "
            "RAY_AUTH_MODE=token here."
        ) from error


def _gpus_of_an_actor(ray: Any, config: "PairConfig") -> int:
    """One, if there are any; all of a machine where the target is spread over them."""
    if config.device == "cpu":
        return 0
    most = max(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
    return most if config.device_map else min(most, 1)
