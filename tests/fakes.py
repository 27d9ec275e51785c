"""Stand-ins for what is too heavy or too free to be scripted in a test."""

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable

from nexuskv.v1 import engine_pb2 as pb
from nexuskv.v1 import engine_pb2_grpc, inference_pb2

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Answers every choice with `script(submit)`, one token a step, then repeats its last token."""

    def __init__(self, info: pb.GetEngineInfoResponse, script: Callable[[pb.Submit], list[int]]) -> None:
        self.info = info
        self._sessions: set[asyncio.Queue[pb.SessionResponse | None]] = set()
        self.reset(script)

    def reset(self, script: Callable[[pb.Submit], list[int]]) -> None:
        self.script, self.load = script, pb.GetLoadResponse()
        self.submits: list[pb.Submit] = []
        self.aborted: list[str] = []
        self.aborted_choices: list[tuple[str, int]] = []
        self.differ: Callable[[int, int], int] = lambda choice, token: token  # what a choice says instead
        self.annotate: Callable[[pb.SequenceOutput, int], None] = lambda output, step: None
        self.rejection: pb.Rejected | None = None
        self.pause_after = 1 << 30  # tokens of a choice, then the engine waits

    def hang_up(self) -> None:
        """Sessions end, and so does every request."""
        for responses in self._sessions:
            responses.put_nowait(None)

    async def GetEngineInfo(self, request: object, context: object) -> pb.GetEngineInfoResponse:
        return self.info

    async def GetLoad(self, request: object, context: object) -> pb.GetLoadResponse:
        return self.load

    async def Drain(self, request: object, context: object) -> pb.DrainResponse:
        return pb.DrainResponse()

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: object
    ) -> AsyncIterator[pb.SessionResponse]:
        responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._sessions.add(responses)
        reader = asyncio.create_task(self._read(requests, responses))
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self._sessions.discard(responses)

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], responses: asyncio.Queue[pb.SessionResponse | None]
    ) -> None:
        running: set[asyncio.Task[None]] = set()
        async for request in requests:
            self.aborted += request.abort.request_ids
            self.aborted_choices += [(c.request_id, c.index) for c in request.abort.choices]
            if request.HasField("submit"):
                self.submits.append(request.submit)
                running.add(asyncio.create_task(self._answer(request.submit, responses)))

    async def _answer(self, submit: pb.Submit, responses: asyncio.Queue[pb.SessionResponse | None]) -> None:
        if self.rejection is not None:
            rejected = pb.Rejected()
            rejected.CopyFrom(self.rejection)
            rejected.request_id = submit.request_id
            return responses.put_nowait(pb.SessionResponse(rejected=rejected))
        responses.put_nowait(pb.SessionResponse(accepted=pb.Accepted(request_id=submit.request_id)))
        tokens, limit = self.script(submit), submit.sampling.max_tokens
        for step in itertools.count():
            while step >= self.pause_after and submit.request_id not in self.aborted:
                await asyncio.sleep(0.002)
            if submit.request_id in self.aborted:
                return None
            token = tokens[min(step, len(tokens) - 1)]
            stops, last = token in submit.sampling.stop_token_ids, step + 1 == limit
            outputs = [
                self._output(submit, i, self.differ(i, token), step)
                for i in range(submit.num_choices)
                if (submit.request_id, i) not in self.aborted_choices
            ]
            for output in outputs if stops or last else ():
                output.finish_reason = STOP if stops else LENGTH
                if stops:
                    output.matched_stop_token = token
            pool = pb.PoolState(num_blocks=100, num_free=90)
            responses.put_nowait(
                pb.SessionResponse(step=pb.StepOutput(step=step, outputs=outputs, pool=pool))
            )
            if stops or last:
                return None
            await asyncio.sleep(0)
        return None

    def _output(self, submit: pb.Submit, index: int, token: int, step: int) -> pb.SequenceOutput:
        output = pb.SequenceOutput(request_id=submit.request_id, index=index, token_ids=_ids([token]))
        if step == 0:
            output.num_cached_tokens, output.first_scheduled, output.sequence_id = 16, submit.arrival, 7
        if submit.report_blocks:
            output.block_table = _ids([3, 5])
        if submit.sampling.HasField("num_logprobs"):
            ids, values = _alternatives(token, submit.sampling.num_logprobs)
            output.logprobs, output.top_logprob_ids, output.top_logprobs = _floats([-0.5]), ids, values
        if step == 0 and submit.sampling.HasField("num_prompt_logprobs"):
            prompt = array("i", submit.prompt_token_ids)[1:]
            tops = [_alternatives(i, submit.sampling.num_prompt_logprobs) for i in prompt]
            output.prompt_logprobs = _floats([-1.5] * len(prompt))
            output.prompt_top_logprob_ids = b"".join(ids for ids, _ in tops)
            output.prompt_top_logprobs = b"".join(values for _, values in tops)
        self.annotate(output, step)
        return output


def _ids(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def _floats(values: list[float]) -> bytes:
    return array("f", values).tobytes()


def _alternatives(token: int, width: int) -> tuple[bytes, bytes]:
    """The token itself first, then its neighbours, the last one impossible."""
    values = [-0.5 - i for i in range(width)]
    return _ids([token + i for i in range(width)]), _floats(
        [*values[:-1], float("-inf")] if width > 1 else values
    )
