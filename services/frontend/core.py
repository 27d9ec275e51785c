"""The one core behind both doors: check, render, tokenize, submit."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nexuskv.v1 import engine_pb2
from services.errors import invalid, not_found, unavailable
from services.frontend.active_request import ActiveRequest, Prompt
from services.frontend.bad_words import token_sequences
from services.frontend.choice import Choice, SilentChoice
from services.frontend.engine_link import EngineLink
from services.frontend.engine_outputs import engine_sampling, pack_ids
from services.frontend.generation import Generation
from services.frontend.health_probe import HealthProbe
from services.frontend.metrics import FrontendMetrics
from services.frontend.rules import check_token_ids, shown
from services.frontend.sampling import Sampling, check_against_model, resolve_max_tokens
from services.frontend.served_model import ServedModel
from services.frontend.text.detokenizer import Detokenizer, unfinished_tail
from services.frontend.text.errors import TemplateError
from services.frontend.turnstile import Turnstile

# Texts longer than this are tokenized in a thread; shorter ones take about a millisecond.
INLINE_CHARS = 1024
# Longer ones than this take so long that they queue among themselves, out of the others' way.
LARGE_CHARS = 100_000
# Beyond this a prompt that cannot fit the context is refused by its size, without counting its tokens.
EXACT_COUNT_BYTES = 2 << 20
TENANT = "default"


@dataclass(frozen=True)
class RequestOptions:
    """What a request wants besides sampling."""

    stream: bool
    prompt_field: str  # how the client calls its prompt, for error messages
    arrival: float  # seconds since the epoch
    cache_salt: str = ""
    priority: int = 0
    skip_special_tokens: bool = True
    trace: bool = False  # every token with its time and blocks

    def traced(self) -> "RequestOptions":
        return replace(self, stream=True, trace=True)


class FrontendCore:
    def __init__(self, link: EngineLink, memory: HealthProbe, metrics: FrontendMetrics) -> None:
        self.metrics = metrics
        self.link = link
        self._memory = memory
        self.turnstile = Turnstile()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._large_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-large")
        self._engine_ids = itertools.count(1)
        self._active: dict[str, set[ActiveRequest]] = defaultdict(set)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._draining = False

    @property
    def num_active(self) -> int:
        return sum(map(len, self._active.values()))

    @property
    def not_ready_reason(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self._draining:
            return "the server is shutting down"
        if self.link.trouble is None and not self._memory.is_serving:
            return "the memory manager does not answer or is not serving"
        return self.link.trouble

    def model(self, name: str | None = None) -> ServedModel:
        """The served model. Raises when there is none now or when the client wants another one."""
        model = self.link.model
        if model is None:
            raise unavailable(self.link.trouble or "no model is loaded yet", "ENGINE_UNAVAILABLE", 1000)
        if name and not model.serves(name):
            raise not_found(
                f"the model {shown(name)} does not exist; this server serves {model.name!r}",
                "MODEL_NOT_FOUND",
                "model",
            )
        return model

    def require_serving(self) -> None:
        """Raises when a request would be refused whatever it says."""
        if self._draining:
            raise unavailable("the server is shutting down", "SHUTTING_DOWN", 1000)
        if (trouble := self.link.trouble) is not None:
            raise unavailable(trouble, "ENGINE_UNAVAILABLE", 1000)
        self.link.refuse_when_full()

    async def encode(self, text: str, field: str, add_bos: bool = True) -> list[int]:
        """Token ids of a prompt; refuses early what is too large for the context whatever its tokens are."""
        model = self.model()
        num_bytes = len(text) if text.isascii() else len(text.encode())
        at_least = num_bytes // model.longest_piece
        if num_bytes > EXACT_COUNT_BYTES and at_least >= model.info.max_model_len:
            raise invalid(
                field,
                f"the prompt has at least {at_least} tokens; the model's context holds "
                f"{model.info.max_model_len}",
                "CONTEXT_LENGTH_EXCEEDED",
            )
        return await self.tokenize(text, add_bos)

    async def tokenize(self, text: str, add_bos: bool = True) -> list[int]:
        encode = self.model().tokenizer.encode
        if len(text) <= INLINE_CHARS:
            return encode(text, add_bos)
        threads = self._threads if len(text) <= LARGE_CHARS else self._large_threads
        return await asyncio.get_running_loop().run_in_executor(threads, encode, text, add_bos)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The messages as the model's template writes them. Raises when it has none or refuses them."""
        model = self.model()
        if model.template is None:
            raise invalid("messages", f"the model {model.name!r} has no chat template", "NO_CHAT_TEMPLATE")
        try:
            return model.template.render(messages, variables)
        except TemplateError as error:
            raise invalid("messages", str(error), "CHAT_TEMPLATE_REFUSED") from error

    def start(
        self, request_id: str, prompts: Sequence[Prompt], sampling: Sampling, options: RequestOptions
    ) -> ActiveRequest:
        """Checks against the model and submits. Raises before anything is submitted."""
        self.require_serving()
        model = self.model()
        check_against_model(sampling, model.info.vocab_size, model.info.max_num_seqs)
        bad_words = token_sequences(sampling.bad_words, model.tokenizer)
        check_token_ids("bad_words", list(itertools.chain(*bad_words)), model.info.vocab_size)
        wake = asyncio.Event()
        generations = [
            self._generation(model, number, prompt, sampling, bad_words, options, wake)
            for number, prompt in enumerate(prompts)
        ]
        request = ActiveRequest(request_id, generations, wake, self.metrics.of(model), self._release)
        self._active[request_id].add(request)
        self._is_idle.clear()
        for generation in generations:
            self.link.submit(generation)
        return request

    def abort(self, request_id: str) -> bool:
        """Ends every running request of this id with ABORT; False when there is none."""
        found = list(self._active.get(request_id, ()))
        for request in found:
            request.abort()
            self.link.release(request.generations)
        return bool(found)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests at once; those left after the timeout end with an error."""
        self._draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            for request in [r for requests in self._active.values() for r in requests]:
                request.fail(unavailable("the server is shutting down", "SHUTTING_DOWN"))

    def close(self) -> None:
        for threads in (self._threads, self._large_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, request: ActiveRequest) -> None:
        self.link.release(request.generations)
        requests = self._active.get(request.request_id, set())
        requests.discard(request)
        if not requests:
            self._active.pop(request.request_id, None)
        if not self._active:
            self._is_idle.set()

    def _generation(
        self,
        model: ServedModel,
        number: int,
        prompt: Prompt,
        sampling: Sampling,
        bad_words: Sequence[Sequence[int]],
        options: RequestOptions,
        wake: asyncio.Event,
    ) -> Generation:
        info, tokenizer, ids = model.info, model.tokenizer, prompt.token_ids
        if not ids:
            raise invalid(options.prompt_field, f"{options.prompt_field} must have at least one token")
        # An answer of no tokens still needs its prompt computed, which gives one token.
        silent = sampling.max_tokens == 0
        wanted = 1 if silent else sampling.max_tokens
        max_tokens = resolve_max_tokens(len(ids), wanted, info.max_model_len, options.prompt_field)
        check_token_ids(options.prompt_field, ids, info.vocab_size)
        submit = engine_pb2.Submit(
            request_id=str(next(self._engine_ids)),
            prompt_token_ids=pack_ids(ids),
            sampling=engine_sampling(sampling, max_tokens, tokenizer.vocabulary.end_ids, bad_words),
            num_choices=sampling.n,
            tenant=TENANT,
            salt=options.cache_salt,
            priority=options.priority,
            arrival=options.arrival,
            report_blocks=options.trace,
        )
        tail = unfinished_tail(tokenizer.decode_bytes(ids[-4:]))
        kind = SilentChoice if silent else Choice
        choices = []
        for index in range(number * sampling.n, (number + 1) * sampling.n):
            detokenizer = Detokenizer(tokenizer, tail, options.skip_special_tokens)
            choices.append(kind(index, detokenizer, sampling.stop, sampling.min_tokens, options.trace))
        return Generation(submit, choices, len(ids), wake, options.stream, self.metrics.of(model))
