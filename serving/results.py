"""What measurements say: their record, what was delivered, the knee, and which of them are
noise."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pandas as pd

from serving.records import write_json
from tables import records

INF = math.inf
KEPT = 0.9        # of a rate: a server that delivers this much keeps up
KEPT_UP, LIMIT, OVERLOADED = "kept up", "at the limit", "overloaded"  # of `verdicts`
NOISY = ", noisy"  # what `states` puts behind such a word
CONTRADICTED = 0.8  # of what the server has shown that it can: who delivers less was disturbed
APART = 0.2       # of the median: repeats of a rate that lie further from each other are noise
BUSY = 0.3        # of the day: a service that people use
FALLS = 1.5       # a wait that shrinks by this much while the load grows is noise
KINDS = ("ttft", "tpot", "itl", "e2el")  # vLLM's names for its times
PERCENTILES = (50, 90, 99)
NUMBERS = ("start_times", "ttfts", "latencies", "output_lens")  # of each request
PER_REQUEST = (*NUMBERS, "errors")
COUNTS = ("num_prompts", "total_input_tokens", "total_output_tokens")

Regime = tuple[int, int]  # tokens of a prompt, and of an answer
Slo = Sequence[float]     # milliseconds to the first token, and per further token


@dataclass(frozen=True)
class Series:
    """What we add to vLLM's numbers: what was measured, and what the server counted meanwhile."""

    made_by: dict          # what it belongs to: server and load
    input_len: int         # tokens of a prompt
    output_len: int        # tokens of an answer
    repeat: int | str      # a number, or a word for a measurement beside the repeats
    speculation: dict | None  # of `asking.acceptance`
    cached_tokens: float   # prompt tokens that came from the prefix cache

    @property
    def regime(self) -> Regime:
        """What the measurement is of."""
        return self.input_len, self.output_len


@dataclass(frozen=True)
class Measurement:
    """One measurement: what `vllm bench serve` saved, and the `Series` that it belongs to.

    Lists have one entry per request, times are in seconds. A request that failed has an error text.
    """

    raw: dict               # all that vLLM saved, and the series: the content of the file
    series: Series
    rate: float             # requests per second that were offered; inf: all at once
    completed: int
    failed: int
    duration: float
    start_times: list[float]
    ttfts: list[float]
    latencies: list[float]
    output_lens: list[int]
    errors: list[str]
    lone: float = 0.0  # seconds of a request alone, as `load.Bench.alone` found; 0: unknown

    @classmethod
    def of(cls, raw: Any) -> Self:
        """The measurement that this content of a file is.

        Raises:
          ValueError: it isn't one.
        """
        try:
            measurement = cls(
                raw=raw,
                series=records.from_json(Series, raw["series"], strict=True),
                rate=float(raw["request_rate"]),
                completed=int(raw["completed"]),
                failed=int(raw["failed"]),
                duration=float(raw["duration"]),
                start_times=raw["start_times"],
                ttfts=raw["ttfts"],
                latencies=raw["latencies"],
                output_lens=raw["output_lens"],
                errors=raw["errors"])
            for name in NUMBERS:
                _check_all(name, raw[name], (int, float))
            _check_all("errors", raw["errors"], str)
            _check_all("duration", [raw["duration"]], (int, float))
            lengths = {len(raw[name]) for name in PER_REQUEST}
            for name in COUNTS:
                int(raw[name])
            for kind in KINDS:
                for p in PERCENTILES:
                    measurement.percentile(kind, p)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no measurement: {error!r}") from error
        if not 0 < measurement.duration < INF:
            raise ValueError(f"no measurement: it took {measurement.duration} s")
        if len(lengths) != 1 or measurement.completed < 1:
            raise ValueError(
                f"no measurement: {measurement.completed} answers in lists of {lengths}")
        return measurement

    @classmethod
    def load(cls, path: Path, made_by: dict) -> Self | None:
        """The kept measurement of a file; None if there is none, or it belongs to something else.

        A damaged file counts as none, with a line that says so: it is measured again.
        """
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_bytes())
            measurement = cls.of(raw)
        except (ValueError, RecursionError):
            print(f"{path} is damaged, so it's measured again")
            return None
        if measurement.series.made_by != made_by:
            return None
        return measurement

    def save(self, path: Path) -> None:
        """Keep it in a file, whole or not at all.

        Raises:
          UserError: the file can't be written.
        """
        write_json(path, self.raw, indent=None)

    def percentile(self, kind: str, p: int) -> float:
        """vLLM's own percentile in milliseconds, of "ttft", "tpot", "itl" or "e2el"."""
        return float(self.raw[f"p{p}_{kind}_ms"])

    def shortest_latency(self) -> float:
        """Seconds of the request that was answered fastest."""
        answered = []
        for latency, error in zip(self.latencies, self.errors, strict=True):
            if not error:
                answered.append(latency)
        return min(answered)

    def answered(self) -> pd.DataFrame:
        """One row per completed request: start, ttft, latency (seconds), tokens."""
        table = pd.DataFrame({
            "start": self.start_times,
            "ttft": self.ttfts,
            "latency": self.latencies,
            "tokens": self.output_lens,
        })
        completed = [not error for error in self.errors]
        return table[completed].reset_index(drop=True)


@dataclass(frozen=True)
class LongRun:
    """A run that's long enough to show a queue which grows slowly; see `load.confirm`."""

    regime: Regime
    rate: float
    measurement: Measurement
    share: float  # of its requests that kept the objective
    held: bool    # whether nine in ten did, and the server kept up


def _check_all(name: str, values: Any, kind: type | tuple[type, ...]) -> None:
    """Raise unless this is a list of which each value has a type; NaN isn't a number.

    Raises:
      TypeError: it isn't.
    """
    if not isinstance(values, list):
        raise TypeError(f"{name} is no list")
    for value in values:
        is_nan = value != value
        is_bool = isinstance(value, bool)  # to Python, a whole number
        if is_nan or is_bool or not isinstance(value, kind):
            raise TypeError(f"{name} has {value!r}")


def delivered_rate(measurement: Measurement, lone: float) -> float:
    """Completed requests per second, corrected for both ends of the run.

    A server that keeps up idles away the end of a run: its last request still takes `lone` seconds,
    as long as a request alone, while nothing arrives any more. Those seconds aren't time under
    load. A server with a queue is busy to the end, and the more so the less of the run saw
    arrivals: `lone` counts by that share.

    At the start it's the other way round. The client waits one random gap before its first
    request too, so n requests take n gaps, and a server that keeps up needs all of them. A server
    with a queue was only kept from its work, so for it we take out the first gap, the `lead`.

    It errs on the low side, by up to a fifth near the limit of a run that is a few latencies long
    (simulated in the tests), and never says more than the server can do.
    """
    starts = measurement.start_times
    duration = measurement.duration
    first = min(starts)
    last = max(starts)
    ends = []
    for start, latency in zip(starts, measurement.latencies, strict=True):
        ends.append(start + latency)
    end = max(ends)

    lone = min(lone, end - last)  # noise may have prolonged the request alone
    lead = max(0.0, duration - (end - first))
    loaded = max(duration - lead - lone, 1e-9)
    share = min(1.0, (last - first) / loaded)
    idle = lone * share + lead * (1 - share)
    return measurement.completed / (duration - idle)


def share_kept(measurement: Measurement, slo: Slo) -> float:
    """Share of the completed requests whose times kept the objective (TTFT and TPOT, in ms).

    A client short of CPU reads tokens late, and several at once: TTFT is then too long, TPOT too
    short. A request that passes all the same got its last token no later than the objective says.
    """
    longest_ttft, longest_tpot = slo
    requests = zip(
        measurement.ttfts,
        measurement.latencies,
        measurement.output_lens,
        measurement.errors,
        strict=True)
    answered = 0
    kept = 0
    for ttft, latency, tokens, error in requests:
        if error:
            continue
        answered += 1
        gaps = max(tokens - 1, 1)
        tpot = (latency - ttft) / gaps
        began_in_time = 1e3 * ttft <= longest_ttft
        went_on_in_time = 1e3 * tpot <= longest_tpot
        if began_in_time and went_on_in_time:
            kept += 1
    return kept / answered


def _row(measurement: Measurement, slo: Slo) -> dict:
    """One row of results.csv; see `rows`."""
    series = measurement.series
    raw = measurement.raw
    lone = measurement.lone
    if measurement.rate == INF:  # a burst keeps the server busy to its end
        lone = 0.0
    delivered = delivered_rate(measurement, lone)
    row: dict[str, Any] = {
        "input_len": series.input_len,
        "output_len": series.output_len,
        "rate": measurement.rate,
        "repeat": series.repeat,
        "requests": raw["num_prompts"],
        "failed": measurement.failed,
        "delivered_rps": delivered,
        "lone_ms": 1e3 * measurement.lone,
    }
    for kind in KINDS:
        for p in PERCENTILES:
            row[f"{kind}_p{p}_ms"] = measurement.percentile(kind, p)
    row["goodput_rps"] = delivered * share_kept(measurement, slo)
    row["in_flight"] = sum(measurement.latencies) / measurement.duration
    row["output_tok_s"] = delivered * raw["total_output_tokens"] / measurement.completed
    row["cached_tokens"] = series.cached_tokens
    return row


def rows(measurements: Sequence[Measurement], slo: Slo,
         dollars_per_hour: float = math.nan) -> pd.DataFrame:
    """results.csv, a row per measurement: what was delivered, latencies in ms, goodput and cost.

    A row depends on nothing but its own measurement, so it says the same whatever comes later. Only
    where nobody measured a request alone (`load.Bench.alone`), the shortest latency of the regime
    stands in for it.

    Args:
      slo: as in `load.Load`.
      dollars_per_hour: of all chips; nan where nobody has a price.
    """
    shortest: dict[Regime, float] = {}
    for measurement in measurements:
        regime = measurement.series.regime
        latency = measurement.shortest_latency()
        before = shortest.get(regime, INF)
        shortest[regime] = min(latency, before)
    table = []
    for measurement in measurements:
        if not measurement.lone:
            regime = measurement.series.regime
            measurement = replace(measurement, lone=shortest[regime])
        row = _row(measurement, slo)
        table.append(row)
    frame = pd.DataFrame(table)
    frame["dollars_per_hour"] = dollars_per_hour
    frame["hours_per_million_output"] = 1e6 / frame.output_tok_s / 3600
    frame["usd_per_million_output"] = frame.hours_per_million_output * dollars_per_hour
    return frame


def two_digits(value: float) -> str:
    """A number to read, such as 13,000 or 0.68."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,g}"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each rate, the median of its repeats, in words to read: state, delivered requests
    per second, share within the objective, and the waits of the slowest tenth."""
    lines = []
    regimes = table.groupby(["input_len", "output_len"])
    for (inputs, outputs), part in regimes:
        middle = part.groupby("rate").median(numeric_only=True)
        for rate, state in states(part).items():
            row = middle.loc[rate]
            share = row.goodput_rps / row.delivered_rps
            line = {
                "regime": f"{inputs}/{outputs}",
                "rate, /s": f"{rate:g}" if rate < INF else "all at once",
                "state": state,
                "delivered, /s": two_digits(row.delivered_rps),
                "in time": f"{share:.0%}",
                "TTFT p90, ms": two_digits(row.ttft_p90_ms),
                "TPOT p90, ms": two_digits(row.tpot_p90_ms)}
            lines.append(line)
    frame = pd.DataFrame(lines)
    if len(regimes) == 1:
        frame = frame.drop(columns="regime")
    return frame


def first_of(measurements: Sequence[Measurement], regime: Regime, rate: float) -> Measurement:
    """The first measurement of a point."""
    for measurement in measurements:
        is_of_regime = measurement.series.regime == tuple(regime)
        if is_of_regime and measurement.rate == rate:
            return measurement
    raise ValueError(f"{regime} at {rate}/s was not measured")


def under_way(measurement: Measurement,
              shares: Sequence[float] = (0.25, 0.5, 1.0)) -> list[int]:
    """How many requests have no whole answer yet, at moments of one run.

    Args:
      shares: of all requests; each is a moment, in which that share of them has just been sent.
    """
    sent = pd.Series(measurement.start_times)
    answered = sent + pd.Series(measurement.latencies)
    in_order = sorted(sent)
    counts = []
    for share in shares:
        place = max(1, round(share * len(in_order)))
        moment = in_order[place - 1]
        unanswered = (sent <= moment) & (answered > moment)
        counts.append(int(unanswered.sum()))
    return counts


def price_column(unit: str) -> str:
    """The column of `rows` with what a million output tokens cost, in this unit."""
    if unit == "USD":
        return "usd_per_million_output"
    return "hours_per_million_output"


def prices(held: Sequence[LongRun], unit: str, dollars_per_hour: float) -> list[str]:
    """What a million output tokens cost at the rates that held, a sentence each.

    Args:
      held: of `load.confirm`, those that held.
      unit: "USD", or "machine-hours" where the machine has no price.
      dollars_per_hour: of all chips; nan where nobody has a price.
    """
    if not held:
        return ["no rate held, so there's no price that anybody could count on"]
    column = price_column(unit)
    sentences = []
    for run in held:
        table = rows([run.measurement], (INF, INF), dollars_per_hour)  # no price has an objective
        price = table[column].iloc[0]
        inputs, outputs = run.regime
        sentences.append(
            f"{inputs}/{outputs} at {run.rate:g}/s: a million output tokens cost {price:.2g} "
            f"{unit} on a machine that's always this busy, {price / BUSY:.2g} {unit} if it's busy "
            f"{BUSY:.0%} of the time")
    return sentences


def promises(held: Sequence[LongRun], table: pd.DataFrame) -> list[str]:
    """What may be promised, a line for each regime whose long run held.

    Args:
      held: of `load.confirm`, those that held.
      table: of `rows`.
    """
    lines = []
    for run in held:
        inputs, outputs = run.regime
        part = table[(table.input_len == inputs) & (table.output_len == outputs)]
        knee, _ = kept_up(part)
        line = f"{run.rate:g}/s is the largest rate that was kept up with"
        if run.rate < knee:
            line = f"{run.rate:g}/s is the largest rate that held"
        line += f", and {run.share:.0%} were in time"
        if len(held) > 1:
            line = f"{inputs}/{outputs}: {line}"
        lines.append(line)
    return lines


def while_it_keeps_up(table: pd.DataFrame) -> pd.DataFrame:
    """The rows at rates up to the knee of their regime, without noisy rates if there are others.

    Of a regime without a knee it's all finite rates.
    """
    parts = []
    for _, part in table.groupby(["input_len", "output_len"]):
        last, _ = kept_up(part)
        if not last:
            finite = part.rate[part.rate < INF]
            last = max(finite)
        below = part[part.rate <= last]
        calm = below[~below.rate.isin(noisy(part))]
        if calm.empty:
            calm = below
        parts.append(calm)
    return pd.concat(parts)


# -- The knee, and what is noise -------------------------------------------------------------------

def undisturbed(values: pd.Series) -> pd.Series:
    """The repeats of a rate without those in which something else took the machine.

    Such a repeat delivered less than four fifths of the median of all repeats.

    Args:
      values: requests per second that each repeat delivered.
    """
    return values[values >= CONTRADICTED * values.median()]


def verdicts(part: pd.DataFrame) -> pd.Series:
    """What the repeats of each rate of one regime say, by rate: `KEPT_UP`, `OVERLOADED`, `LIMIT`.

    A server keeps up with a rate only if every repeat delivered at least 90% of it. If no repeat
    did, the rate is overloaded. If the repeats disagree, the rate is at the server's limit. Repeats
    that noise has disturbed don't count (`undisturbed`).

    A rate that exceeds the most that was ever delivered is overloaded as well: a rate 8% above the
    limit is delivered to 92%, and yet its queue grows forever. And so is all at once.
    """
    most = 1.02 * part.delivered_rps.max()
    words = {}
    for rate, values in part.groupby("rate").delivered_rps:
        enough = undisturbed(values) >= KEPT * rate
        if rate > most or not enough.any():
            words[rate] = OVERLOADED
        elif enough.all():
            words[rate] = KEPT_UP
        else:
            words[rate] = LIMIT
    return pd.Series(words).sort_index()


def kept_up(part: pd.DataFrame) -> tuple[float, float]:
    """The knee of one regime: (the last rate that was kept up with, the first overloaded one).

    The last is the largest one below the first overloaded one that every repeat kept up with (see
    `verdicts`). Where the repeats of a smaller rate disagree, that's noise, because a smaller rate
    is easier. What lies between the two is at the limit.

    The last is 0 if even the smallest rate was too much. The first overloaded one is inf, all at
    once, if no other is.

    Args:
      part: the rows of one regime, of `rows`.
    """
    last = 0.0
    for rate, verdict in verdicts(part).items():  # ascending
        if verdict == OVERLOADED:
            return last, rate
        if verdict == KEPT_UP:
            last = rate
    return last, INF


def overloaded_rate(part: pd.DataFrame) -> float:
    """The largest rate of one regime that is overloaded by its `states`; inf if only a burst is."""
    crowded = INF
    for rate, state in states(part).items():  # ascending
        if rate < INF and state.startswith(OVERLOADED):
            crowded = rate
    return crowded


def calm_rate(part: pd.DataFrame) -> float:
    """The largest rate of one regime up to 70% of its knee, or else the smallest rate."""
    last, _ = kept_up(part)
    calm = part.rate[part.rate <= 0.7 * last]
    if calm.empty:
        return part.rate.min()
    return calm.max()


def within(part: pd.DataFrame) -> pd.Series:
    """By rate of one regime: True up to the knee where, in the middle of the repeats, nine requests
    in ten kept the objective.

    A request counts only if its TTFT *and* its TPOT were within it. Two p90s wouldn't do: each may
    be within it while up to 20% of the requests miss one of the two.
    """
    knee, _ = kept_up(part)
    kept = part.goodput_rps / part.delivered_rps
    share = kept.groupby(part.rate).median()
    return (share >= KEPT) & (share.index <= knee)


def is_overloaded(rate: float, delivered: float) -> bool:
    """Whether a measurement delivered too little of its rate: a queue grew, or noise took time."""
    return delivered < KEPT * rate


def is_contradicted(rate: float, delivered: float, part: pd.DataFrame) -> bool:
    """Whether the server delivered far less than it can, so that something disturbed it.

    What it can deliver is the largest median over the repeats of a rate. Offered as much or more, a
    server is busy all the time and delivers that again; offered less, it delivers what is offered.
    A burst is no yardstick for a rate, because a server that reads many prompts in one step can
    deliver more.
    """
    middle = part.groupby("rate").delivered_rps.median()
    finite = middle[middle.index < INF]
    if rate < INF and len(finite):
        middle = finite
    expected = min(rate, middle.max())
    return delivered < CONTRADICTED * expected


def noisy(part: pd.DataFrame) -> list[float]:
    """The rates of one regime whose measurements contradict each other, or those of another rate.

    Four things can't be, on a machine that serves and does nothing else: a server that delivers
    less than it has shown that it can (`is_contradicted`); repeats of a rate, below the first
    overloaded one, that lie more than a fifth apart; a rate that some repeat didn't keep up with,
    although all repeats of a larger rate did; and a wait for the first token that falls while the
    load grows.
    """
    last, above = kept_up(part)
    verdict_of = verdicts(part)
    at_limit = verdict_of.index[verdict_of == LIMIT]
    doubtful = set(at_limit[at_limit < last])
    delivered = part.groupby("rate").delivered_rps.agg(["median", "min", "max"])
    for rate, row in delivered.iterrows():
        middle = row["median"]
        spread = row["max"] - row["min"]
        if rate < above and spread / middle > APART:
            doubtful.add(rate)
        if is_contradicted(rate, middle, part):
            doubtful.add(rate)

    below = part[part.rate <= last]
    waits = below.groupby("rate").ttft_p90_ms.median()
    for slower, faster in _neighbors(waits):
        if waits[slower] > FALLS * waits[faster]:
            doubtful.add(slower)
    return sorted(doubtful)


def _neighbors(by_rate: pd.Series | pd.DataFrame) -> Iterator[tuple[float, float]]:
    """(a rate, the next higher one) of a table whose index is rates, ascending."""
    rates = by_rate.index
    return zip(rates, rates[1:], strict=False)


def states(part: pd.DataFrame) -> dict[float, str]:
    """What each rate of one regime is, in words: "kept up", "at the limit" or "overloaded", and
    whether it is noisy."""
    last, above = kept_up(part)
    doubtful = noisy(part)
    words = {}
    for rate in sorted(set(part.rate)):
        state = LIMIT
        if rate <= last:
            state = KEPT_UP
        elif rate >= above:
            state = OVERLOADED
        if rate in doubtful:
            state += NOISY
        words[rate] = state
    return words
