"""What a step costs, learned from the steps' own times: seconds for each step, decode row and
prompt token, and which share of the device's time has been used.

A step takes `fixed_s` whatever is in it, and more for each row: so a row's own cost is what one
more of them adds. The sum of rows' own costs over the time that went by is the load: below 1 even
when the device never rests, for steps with few rows are mostly `fixed_s`, which more rows would
share.
"""

from __future__ import annotations

import math

from ..plan import StepPlan

LOAD_MEMORY_S = 2.0  # seconds over which the load is a mean
MIN_WAIT_S = 0.001
_MEMORY = 64  # steps that the running means remember
_OLD = 3  # as many new ones count for as much as all that were before
_MIN_PROMPT_TOKENS = 4  # of a step whose time says something of a prompt's token
_MANY_ROWS = 16.0
_LEAST_SPREAD = 0.1  # of the mean number of rows, to tell what one more of them costs (guess)
_DEFAULT_ROW_TOKENS = 2.0  # what a decode row costs before that is known (guess)
_TRIAL_AFTER = 256  # steps, none of decode rows alone: what these take may be another thing by now
_TRIAL_PAUSE = 32  # steps until the next one, where a trial has measured nothing
_LEAST_TOKEN_S = 1e-9  # of a prompt's token: limits divide by it
_OUTLIER = 4.0  # times what was expected


class StepCosts:
    """Running means over steps; costs are None or 0 until something was measured."""

    def __init__(self) -> None:
        self.prompt_token_s: float | None = None
        self._num_rows = _Line()
        self._usual_rows: float | None = None  # of steps that have decode rows
        self._most_rows = 0.0  # that were measured alone, fading
        self._num_since = 0  # steps since any was
        self._next_trial = 0  # by that number
        self._is_doubtful = False  # the last time was an outlier, and not believed
        self._load_s = 0.0  # seconds of work, fading
        self._load_at_s = 0.0

    @property
    def decode_row_s(self) -> float:
        """What one more decode row adds to a step."""
        return self._num_rows.slope

    @property
    def decode_step_s(self) -> float | None:
        """What a step of as many decode rows as usual takes, without prompts; None: no step of
        decode rows alone was measured."""
        return None if self._usual_rows is None else self.decode_rows_s(self._usual_rows)

    def decode_rows_s(self, num_rows: float) -> float | None:
        """The same for so many."""
        return self._num_rows.at(num_rows) if self._num_rows.num else None

    def take_trial(self, num_rows: int) -> bool:
        """Whether the next step should be of so many decode rows alone, to be measured: no step of
        half as many has been, or none for long, as where prompts never end."""
        if not self.prompt_token_s or self._num_since < self._next_trial:
            return False
        if num_rows <= 2 * self._most_rows and self._num_since < _TRIAL_AFTER:
            return False
        self._next_trial = self._num_since + _TRIAL_PAUSE
        return True

    @property
    def row_tokens(self) -> float:
        """What a decode row costs, in prompt tokens; its share of the step's fixed time counts."""
        if not self.prompt_token_s or not self._num_rows.mean_x:
            return _DEFAULT_ROW_TOKENS
        share_s = self._num_rows.mean_y / self._num_rows.mean_x
        return min(64.0, max(0.25, share_s / self.prompt_token_s))

    def note(
        self, plan: StepPlan, duration_s: float, now_s: float, *, is_load: bool = True
    ) -> None:
        """A step took so long, and ended now. `is_load`: somebody has asked for what it did."""
        lengths = [row.known_end - row.start for row in plan.rows]
        num_rows = lengths.count(1)
        self.note_rows(num_rows, sum(lengths) - num_rows, duration_s, now_s, is_load=is_load)

    def note_rows(
        self,
        num_rows: int,
        num_prompt_tokens: int,
        duration_s: float,
        now_s: float,
        *,
        is_load: bool = True,
    ) -> None:
        """The same of a step with so many decode rows, and so many tokens of prompts."""
        if num_rows:
            self._usual_rows = _mean(self._usual_rows, num_rows)
        if not num_prompt_tokens:
            self._note_alone(num_rows, duration_s)
        else:
            self._num_since += 1
            rest_s = duration_s - (self._num_rows.at(num_rows) if num_rows else 0.0)
            if num_prompt_tokens >= _MIN_PROMPT_TOKENS and rest_s > 0.0:
                token_s = max(rest_s / num_prompt_tokens, _LEAST_TOKEN_S)
                self.prompt_token_s = _mean(self.prompt_token_s, token_s)
        if not is_load:
            return
        work_s = num_rows * self.decode_row_s + num_prompt_tokens * (self.prompt_token_s or 0.0)
        self._load_s = self._fading(now_s) + min(work_s, duration_s)
        self._load_at_s = now_s

    def _note_alone(self, num_rows: int, duration_s: float) -> None:
        """A step of decode rows. A hiccup, which the next one does not confirm, is not believed:
        where prompts never end it would count for long."""
        rows = self._num_rows
        if self._num_since >= _TRIAL_AFTER:
            rows.forget()
        expected_s = rows.at(num_rows)
        if rows.num == 1 and duration_s * _OUTLIER < expected_s:
            self._num_rows = rows = _Line()  # it was the first one
        elif rows.num and not self._is_doubtful and duration_s > _OUTLIER * expected_s:
            self._is_doubtful = True
            self._next_trial = 0
            return
        self._is_doubtful = False
        rows.add(num_rows, duration_s)
        faded = self._most_rows + (num_rows - self._most_rows) / _MEMORY
        self._most_rows = max(num_rows, faded)
        self._num_since = self._next_trial = 0

    def describe(self) -> dict[str, float]:
        """What is known, as plain data: seconds for a prompt's token, what a decode row costs in
        these, and what one more of them does."""
        if not self.prompt_token_s:
            return {}
        return {
            "prompt_token_s": self.prompt_token_s,
            "row_tokens": self.row_tokens,
            "added_row_tokens": self._added_row_s / self.prompt_token_s,
        }

    @property
    def _added_row_s(self) -> float:
        """`decode_row_s`, or where all steps had about as many rows, a share of such a step: where
        there are many, little of it is the step's own. 0: nothing is known."""
        rows = self._num_rows
        if rows.spread_x >= _LEAST_SPREAD * rows.mean_x:
            return rows.slope
        return rows.mean_y / rows.mean_x if rows.mean_x >= _MANY_ROWS else 0.0

    def load(self, now_s: float) -> float:
        """Which share of the last seconds was work that would not have been cheaper in a fuller
        step; in [0, about 1]."""
        return self._fading(now_s) / LOAD_MEMORY_S

    def seconds_until(self, load: float, now_s: float) -> float:
        """How long until it is below that, if nothing is done; at least a millisecond."""
        now = self.load(now_s)
        return MIN_WAIT_S + (LOAD_MEMORY_S * math.log(now / load) if now > load else 0.0)

    def _fading(self, now_s: float) -> float:
        return self._load_s * math.exp((self._load_at_s - now_s) / LOAD_MEMORY_S)


class _Line:
    """The straight line through fading points (x, y), neither falling nor below 0."""

    def __init__(self) -> None:
        self.mean_x = self.mean_y = 0.0
        self.num = 0  # of points, up to what is remembered
        self._var = self._cov = 0.0

    @property
    def slope(self) -> float:
        """In [0, mean_y / mean_x]."""
        if self._var <= 0.0 or not self.mean_x:
            return 0.0
        return min(max(self._cov / self._var, 0.0), self.mean_y / self.mean_x)

    @property
    def spread_x(self) -> float:
        """The standard deviation of x."""
        return math.sqrt(max(0.0, self._var))

    def at(self, x: float) -> float:
        """y there."""
        return max(0.0, self.mean_y + self.slope * (x - self.mean_x))

    def forget(self) -> None:
        """All points are old: the next ones count for more."""
        self.num = min(self.num, _OLD)

    def add(self, x: float, y: float) -> None:
        self.num = min(self.num + 1, _MEMORY)
        weight = 1 / self.num
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += weight * dx
        self.mean_y += weight * dy
        self._var += weight * (dx * dx * (1 - weight) - self._var)
        self._cov += weight * (dx * dy * (1 - weight) - self._cov)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + (value - before) / 8
