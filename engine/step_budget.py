"""How many tokens a step may compute."""

# With decodes running, prefill chunks are cut so that a step takes about this long: it bounds the
# inter-token latency of running streams while long prompts arrive.
TARGET_STEP_S = 0.1
MIN_PREFILL_TOKENS = 32


class StepBudget:
    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max = max_num_batched_tokens
        self._seconds_per_token: float | None = None

    def num_tokens(self, num_decodes: int) -> int:
        """The step's budget in tokens, decodes included."""
        if num_decodes == 0 or self._seconds_per_token is None:
            return self._max
        affordable = int(TARGET_STEP_S / self._seconds_per_token)
        return min(self._max, max(num_decodes + MIN_PREFILL_TOKENS, affordable))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from steps large enough that rows, not reading weights, bound them."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return
        new = seconds / num_tokens
        old = self._seconds_per_token
        self._seconds_per_token = new if old is None else 0.8 * old + 0.2 * new
