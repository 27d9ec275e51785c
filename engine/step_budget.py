"""How many tokens a step may compute."""

# Prefill chunks are cut so that a step takes about this long: with decodes running it bounds their
# inter-token latency, and always how long an abort or a new request waits for the step's end.
TARGET_STEP_WITH_DECODES_S = 0.1
TARGET_STEP_S = 0.4
MIN_PREFILL_TOKENS = 32


class StepBudget:
    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max = max_num_batched_tokens
        self._seconds_per_token: float | None = None

    def num_tokens(self, num_decodes: int) -> int:
        """The step's budget in tokens, decodes included."""
        if self._seconds_per_token is None:
            return self._max
        target_s = TARGET_STEP_WITH_DECODES_S if num_decodes else TARGET_STEP_S
        affordable = int(target_s / self._seconds_per_token)
        return min(self._max, max(num_decodes + MIN_PREFILL_TOKENS, affordable))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from steps large enough that rows, not reading weights, bound them."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return
        new = seconds / num_tokens
        old = self._seconds_per_token
        self._seconds_per_token = new if old is None else 0.8 * old + 0.2 * new
