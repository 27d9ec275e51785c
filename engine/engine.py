"""The engine: schedule, run, postprocess."""

from dataclasses import dataclass

from engine.ledger import Ledger
from engine.memory_client import MemoryClient
from engine.metrics import EngineMetrics
from engine.outputs import SequenceOutput
from engine.runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Request
from engine.speculation.planner import SpeculationPlanner

# Draft tokens asked of the memory manager at a time: enough for the steps until the next answer.
NUM_OFFERED_DRAFTS = 64


@dataclass(frozen=True)
class Load:
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free: int  # free or evictable now


class Engine:
    """Used from one thread; `services` feeds it and takes what it puts out."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: MemoryClient,
        limits: SchedulerLimits,
        model_fingerprint: str,
        planner: SpeculationPlanner | None = None,
    ) -> None:
        """Without a planner nothing is drafted."""
        self.metrics = EngineMetrics()
        self._limits = limits
        num_drafts = 0 if planner is None else NUM_OFFERED_DRAFTS
        self._ledger = Ledger(memory, runner.copy_blocks, num_drafts)
        self._scheduler = Scheduler(self._ledger, limits, model_fingerprint, self.metrics, planner)
        self._runner = runner

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError when it cannot be served."""
        self._scheduler.add(request)

    def abort(self, request_id: str, asked_at: float | None = None, index: int | None = None) -> None:
        """Takes effect before the next step; unknown ids are ignored. `asked_at` is by time.monotonic.

        Every choice ends, or only the one with that index.
        """
        self._scheduler.abort(request_id, asked_at, index)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[SequenceOutput]:
        batch = self._scheduler.schedule()
        result = None if batch is None else self._runner.run(batch)
        return self._scheduler.postprocess(batch, result)

    def load(self) -> Load:
        """May be called from another thread: a snapshot of counters."""
        available = self._ledger.num_free + self._ledger.num_evictable
        return Load(
            self._scheduler.num_running, self._scheduler.num_waiting, self._limits.num_blocks, available
        )
