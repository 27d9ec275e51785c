"""A grammar for tests: a finite automaton over token ids that allows about a third of them in each state."""

import numpy as np
import numpy.typing as npt

NUM_STATES = 11


class AutomatonMatcher:
    """A `GrammarMatcher`. Remembers every state, so that it can go back."""

    def __init__(self, grammar: "Automaton") -> None:
        self._grammar = grammar
        self.states = [0]

    def accept(self, token: int) -> bool:
        if token not in self._grammar.allowed(self.states[-1]):
            return False
        self.states.append((self.states[-1] * 5 + token + 1) % NUM_STATES)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self.states)
        del self.states[len(self.states) - num_tokens :]

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        words = mask.view(np.uint32)
        for token in self._grammar.allowed(self.states[-1]):
            words[token // 32] |= np.uint32(1 << token % 32)


class Automaton:
    """A `Grammar`. The end token is allowed in every third state, where `ends`."""

    def __init__(self, vocab_size: int = 32, end: int = 3, ends: bool = True) -> None:
        self._allowed = [self._in_state(state, vocab_size, end, ends) for state in range(NUM_STATES)]

    def start(self) -> AutomatonMatcher:
        return AutomatonMatcher(self)

    def allowed(self, state: int) -> set[int]:
        return self._allowed[state]

    @staticmethod
    def _in_state(state: int, vocab_size: int, end: int, ends: bool) -> set[int]:
        tokens = {t for t in range(vocab_size) if (t * 7 + state) % 3 == 0} - {end}
        return tokens | ({end} if ends and state % 3 == 2 else set())

    def allows(self, tokens: list[int]) -> bool:
        matcher = self.start()
        return all(matcher.accept(token) for token in tokens)
