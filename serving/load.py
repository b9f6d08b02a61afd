"""Load a server with vLLM's own client, find the rate where its queue begins, and confirm a price.

A *regime* is a prompt length and an answer length, a *point* a regime at one request rate. Each
point is measured several times; every measurement is one JSON file that is kept and read again by a
later run.
"""

import codecs
import contextlib
import itertools
import json
import math
import os
import shlex
import subprocess
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import pandas as pd

from serving import asking, commands, environment, server
from serving.options import Options
from serving.records import ServerRecord
from serving.results import (CONTRADICTED, INF, KEPT, LongRun, Measurement, Regime, Slo,
                             is_contradicted, is_overloaded, kept_up, noisy, rows, share_kept,
                             within)
from serving.vllm_cpu import DONE
from tables import texts
from tables.errors import UserError

WITHIN = 1.25  # the knee is looked for until two rates this far apart enclose it
MOST_RATES = 12  # of one regime: a server that is so hard to judge is left as it is
UP = 1.35        # the next rate that is tried while none is overloaded
CROWDED = 0.7    # of the highest rate: if no more of it is delivered, the queue is plain to see
SLOWEST = 50     # a rate this many times smaller than the guess isn't tried: it would take too long
NEAR = 1.5       # rates from the knee's divided by this one get all repeats
ALONE = 5        # requests, one after the other, that say how long one alone takes
CLEARLY = 0.97   # of a rate: whoever delivers this much at once keeps up without any doubt
CACHED = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Load:
    """What 06 measures."""

    regimes: tuple[Regime, ...] = ((256, 32),)
    rates: int = 7          # how many are measured around the knee, beside all at once
    repeats: int = 3        # measurements of a point near the knee; further away one less
    again: int = 2          # at most so many more, of a point that noise disturbed
    seconds: float = 60.0   # at most that the server takes; smaller rates up to twice as long
    min_requests: int = 12  # per point, however slow the server
    long: float = 600.0     # seconds of the run that confirms a price; at the least 20 latencies
    warmups: int = 1        # requests before each point, not counted
    slo: Slo = (2000, 60)   # the objective: milliseconds to the first token, per further token


class Point(NamedTuple):
    """What one measurement sends.

    Attributes:
      regime: (prompt, answer) lengths. With `prompts` only the answer's counts: the most it may
        have.
      rate: requests per second, or inf.
      requests: how many.
      prompts: a file from which the requests come (`check_prompts`); answers end where they end. No
        warm-up is sent before them: it would be the first of them, and a prefix cache would then
        know it. The seed salts such a cache, so that it knows nothing of an earlier run with the
        same file.
      together: how many requests may be under way at once; 0: any number.
    """

    regime: Regime
    rate: float
    requests: int
    prompts: str | Path | None = None
    together: int = 0

    @property
    def name(self) -> str:
        """The beginning of its file's name."""
        inputs, outputs = self.regime
        return f"{inputs}-{outputs}_{self.rate:g}"


def check_prompts(path: str | Path) -> int:
    """How many prompts a file has for `--dataset-name custom`: a JSON object with `prompt` per
    line.

    Raises:
      UserError: the file can't be read, by us or by vLLM's `CustomDataset`, or a line has no
        prompt.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Correct the path.") from error
    if Path(path).suffix != ".jsonl":
        raise UserError(f"{path}: vLLM's client only reads files that end in .jsonl. Rename it.")
    if content.startswith(codecs.BOM_UTF8):
        raise UserError(f"{path} begins with a byte order mark, which vLLM's client can't read. "
                        f"Remove it: sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}")
    count = 0
    for line in texts.json_lines(content):
        prompt = None
        if isinstance(line.value, dict):
            prompt = line.value.get("prompt")
        if not prompt or not isinstance(prompt, str):
            raise UserError(f"{path}, line {line.number}: no prompt. "
                            'Each line is {"prompt": "..."}.')
        count += 1
    if not count:
        raise UserError(f'{path}, line 1: no prompt. Each line is {{"prompt": "..."}}.')
    return count


# -- One measurement -------------------------------------------------------------------------------

class Runner(Protocol):
    """What measures: a `Client`, or a stand-in in the tests."""

    record: ServerRecord

    def run(self, arguments: list[str]) -> dict:
        """The JSON that `vllm <arguments>` saves."""


class Client(contextlib.AbstractContextManager):
    """`vllm bench serve` for a recorded server, also for one in a container: it only sends HTTP.

    One process of vLLM's CPU build does all runs, because importing vLLM takes ten seconds on two
    cores.

    Attributes:
      record: the running server's; another one may take its place.
    """

    def __init__(self, folder: str | Path) -> None:
        self.record = server.current(folder)
        self.log = Path(folder) / "client.log"
        self.process: subprocess.Popen | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if there is one. It also ends with this one: its input is a pipe."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, arguments: list[str]) -> dict:
        """Run `vllm <arguments>` and return the JSON that it saves.

        Raises:
          UserError: it failed; its last lines.
        """
        with tempfile.TemporaryDirectory() as folder, open(self.log, "ab", buffering=0) as log:
            plain = environment.without_secrets(shlex.join(arguments))
            log.write(f"\n$ vllm {plain}\n".encode())
            process = self.process or self._begin(log)
            path = Path(folder) / "result.json"
            place = ["--result-dir", folder, "--result-filename", path.name]
            try:
                _send(process, [*arguments, *place])
                is_done = _is_done(process, log)
            except BaseException:  # Ctrl-C: else the next run would read the end of this one
                self.close()
                raise
            if is_done:
                return json.loads(path.read_text())
        self.process = None
        status = process.wait()
        last = server.last_lines(self.log)
        raise UserError(f"vllm bench serve failed ({status}):\n{last}")

    def _begin(self, log: BinaryIO) -> subprocess.Popen:
        """Start the process; it knows the server's key, if there is one, and no proxy."""
        server.prepare("bash", "setup.sh", "serve")
        settings = ["HF_HUB_OFFLINE=1"]
        key = environment.api_key(self.record.environment)
        if key:
            settings.append(f"OPENAI_API_KEY={key}")
        self.process = subprocess.Popen(
            [commands.VENV / "python", commands.LAUNCHER, "--lines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=commands.ROOT,
            env=environment.for_child(settings, commands.own_places("cpu")))
        return self.process


def _send(process: subprocess.Popen, words: list[str]) -> None:
    """Give the client's process the arguments of its next run."""
    line = json.dumps(words) + "\n"
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it has died: its exit status will say so
        process.stdin.write(line.encode())
        process.stdin.flush()


def _is_done(process: subprocess.Popen, log: BinaryIO) -> bool:
    """Wait for the end of a run, and log what it prints; False if the process ended instead."""
    assert process.stdout
    for line in process.stdout:
        if line.decode().strip() == DONE:
            return True
        log.write(line)
    return False


def arguments(record: ServerRecord, load: Load, point: Point, seed: int) -> list[str]:
    """The arguments of `vllm` for one point at the server of `record`."""
    inputs, outputs = map(str, point.regime)
    together = []
    if point.together:
        together = ["--max-concurrency", str(point.together)]
    if point.prompts:
        source = ["--dataset-name", "custom",
                  "--dataset-path", str(point.prompts),
                  "--custom-output-len", outputs,
                  "--skip-chat-template",
                  "--disable-shuffle",
                  "--num-warmups", "0",
                  "--extra-body", json.dumps({"cache_salt": str(seed)}),
                  "--ready-check-timeout-sec", "0"]
    else:
        source = ["--dataset-name", "random",
                  "--random-input-len", inputs,
                  "--random-output-len", outputs,
                  "--ignore-eos",
                  "--num-warmups", str(load.warmups)]
    return ["bench", "serve",
            "--backend", "openai",
            "--endpoint", "/v1/completions",
            "--base-url", record.base_url,
            "--model", record.name,
            "--tokenizer", record.model,
            *source,
            *together,
            "--request-rate", str(point.rate),
            "--num-prompts", str(point.requests),
            "--seed", str(seed),
            "--temperature", "0",
            "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", "50,90,99",
            "--goodput", f"ttft:{load.slo[0]}", f"tpot:{load.slo[1]}",
            "--disable-tqdm",
            "--save-result",
            "--save-detailed"]


def _first_error(result: dict) -> str:
    """The last line of the first error in what `vllm bench serve` saved."""
    for error in result.get("errors", []):
        if error:
            lines = error.strip().splitlines()
            return lines[-1][:200]
    return "no error text"


class Bench(NamedTuple):
    """What measures, and what it measures.

    Attributes:
      client: a `Client` of a server of these options.
      options: of the server.
      load: the settings of 06.
      folder: of the results; each is `<prompt>-<answer>_<rate>_<repeat>.json`.
    """

    client: Runner
    options: Options
    load: Load
    folder: str | Path

    def measure(self, point: Point, repeat: int | str) -> Measurement:
        """One measurement on an idle server: the stored one if it's of the same, else a new one.

        Args:
          point: what's sent.
          repeat: a number, or a word for a measurement beside the repeats.

        Raises:
          UserError: the server isn't idle or has died; the client failed; or no request was
            answered.
        """
        name = f"{point.name}_{repeat}"
        path = Path(self.folder) / f"{name}.json"
        made_by = self.made_by(point)
        kept = Measurement.load(path, made_by)
        if kept:
            return kept

        seed = zlib.crc32(name.encode())  # another one for each: equal seeds send equal prompts
        record = self.client.record
        before = asking.wait_idle(record)
        words = arguments(record, self.load, point, seed)
        result = self.client.run(words)
        after = asking.counters(record)
        if not result.get("completed"):
            why = _first_error(result)
            raise UserError(f"none of {point.requests} requests was answered: {why}")
        if point.prompts and result["failed"]:  # a sweep says it beside the rate
            why = _first_error(result)
            print(f"{result['failed']} of {point.requests} requests failed: {why}")

        inputs, outputs = point.regime
        result["series"] = {
            "made_by": made_by,
            "input_len": inputs,
            "output_len": outputs,
            "repeat": repeat,
            "speculation": asking.acceptance(before, after),
            "cached_tokens": after[CACHED] - before[CACHED],
        }
        measurement = Measurement.of(result)
        measurement.save(path)
        return measurement

    def made_by(self, point: Point) -> dict:
        """What a measurement belongs to: the server, the machine if it's a CPU, the requests."""
        made_by = self.options.measured()
        made_by["requests"] = point.requests
        made_by["cores"] = 0
        if not self.options.chip:
            made_by["cores"] = os.cpu_count()
        if point.prompts:
            content = Path(point.prompts).read_bytes()
            made_by["prompts"] = zlib.crc32(content)
        else:
            made_by["warmups"] = self.load.warmups
        return made_by

    def alone(self, regime: Regime) -> float:
        """Seconds of one request that has the server to itself: the shortest of `ALONE` in a row.

        It's measured once, before a sweep, and then read from its file. What a run delivered is
        computed with it (`results.delivered_rate`), so a later measurement can't change what an
        earlier one says.
        """
        point = Point(regime, INF, ALONE, together=1)
        measurement = self.measure(point, "alone")
        return measurement.shortest_latency()


# -- The sweep -------------------------------------------------------------------------------------

def name_of(regime: Regime) -> str:
    """The name of a regime, to print."""
    inputs, outputs = regime
    return f"{inputs}/{outputs}"


def in_words(regime: Regime) -> str:
    """The lengths of a regime, for a title."""
    inputs, outputs = regime
    return f"{inputs} tokens in, {outputs} out"


def at_rate(regime: Regime, rate: float) -> str:
    """The name of a point, to print."""
    if rate == INF:
        return f"{name_of(regime)}, all at once"
    return f"{name_of(regime)} at {rate:g}/s"


def rounded(rate: float) -> float:
    """A rate with two digits, as file names and pages show it."""
    return float(f"{rate:.2g}")


def next_rate(part: pd.DataFrame, guess: float) -> float | None:
    """The rate that is still missing to enclose the knee of one regime; None if none is.

    The knee is enclosed once three things are known: a rate that the server keeps up with, a rate
    that is overloaded beyond doubt (`CROWDED`), and that the next rate above the first is at most
    `WITHIN` times as large.

    Args:
      part: the rows of one regime, of `results.rows`.
      guess: requests per second that the server is thought to manage.
    """
    rates = sorted(set(part.rate) - {INF})
    if not rates:
        return rounded(0.6 * guess)
    if len(rates) >= MOST_RATES:
        return None
    last, above = kept_up(part)
    if not last:
        half = rounded(rates[0] / 2)
        if half > guess / SLOWEST:
            return half
        return None
    highest = rates[-1]
    delivered = part[part.rate == highest].delivered_rps.median()
    if last == highest > guess:  # the guess was far too low
        return rounded(2 * highest)
    if above == INF or delivered > CROWDED * highest:
        return rounded(UP * highest)
    place = rates.index(last)
    following = rates[place + 1]
    if following / last > WITHIN:
        return rounded(math.sqrt(last * following))
    return None


def spread(rates: list[float], count: int) -> list[float]:
    """The same rates and more, until there are `count`: half the smallest, then middles of gaps."""
    rates = sorted(rates)
    if len(rates) < count:
        lowest = rounded(rates[0] / 2)
        rates.insert(0, lowest)
    while len(rates) < count:
        ratios = []
        for low, high in itertools.pairwise(rates):
            ratios.append(high / low)
        gap = ratios.index(max(ratios))  # the first of the widest
        above = gap + 1
        middle = math.sqrt(rates[gap] * rates[above])
        rates.insert(above, rounded(middle))
    return rates


class _Sweep:
    """The measurements of one sweep, each made once; see `sweep`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.load = bench.load
        self.made: dict[tuple[Regime, float, int | str], Measurement] = {}
        self.lone: dict[Regime, float] = {}     # seconds of a request alone
        self.guesses: dict[Regime, float] = {}  # requests per second that a burst was answered with

    def table_of(self, regime: Regime, guesses_too: bool = True) -> pd.DataFrame:
        """The rows of one regime, in the order in which they were measured.

        Args:
          guesses_too: whether the bursts are among them that only served to guess.
        """
        part = []
        for (its_regime, _, repeat), measurement in self.made.items():
            is_guess = not isinstance(repeat, int)
            if is_guess and not guesses_too:
                continue
            if its_regime == regime:
                part.append(measurement)
        return rows(part, self.load.slo)

    def last_delivered(self, regime: Regime) -> float:
        """Requests per second that the last measurement of a regime delivered."""
        table = self.table_of(regime)
        return table.delivered_rps.iloc[-1]

    def at(self, regime: Regime, rate: float, repeat: int | str) -> None:
        """Measure one point once, and print the share of its rate that was delivered."""
        key = regime, rate, repeat
        if key in self.made:
            return
        point = Point(regime, rate, self.requests_at(regime, rate))
        measurement = self.bench.measure(point, repeat)
        self.made[key] = replace(measurement, lone=self.lone[regime])

        delivered = self.last_delivered(regime)
        words = f"all at once {rounded(delivered):g}/s"
        if rate < INF:
            share = delivered / rate
            words = f"{rate:g}/s {share:.0%}"
        if measurement.failed:
            words += f" ({measurement.failed} of {point.requests} requests failed)"
        print(f"  {words}", end="", flush=True)

    def requests_at(self, regime: Regime, rate: float) -> int:
        """How many requests a point has: `seconds` of all that the server can take, or of twice the
        rate."""
        fewest = self.load.min_requests
        if regime not in self.guesses:
            return 2 * fewest
        per_second = min(2 * rate, self.guesses[regime])
        requests = math.ceil(self.load.seconds * per_second)
        return max(fewest, requests)

    def judge(self, regime: Regime, rate: float) -> None:
        """Measure a rate: once if that leaves no doubt, else `load.repeats` times.

        There's no doubt if nearly all of it was delivered, or if it's more than the bursts got and
        far too little was delivered.
        """
        print(f"{name_of(regime)}, delivered:", end="")
        self.at(regime, rate, 0)
        share = self.last_delivered(regime) / rate
        keeps_up = share >= CLEARLY
        too_much = share < CONTRADICTED and rate >= self.guesses[regime]
        is_in_doubt = not keeps_up and not too_much
        if is_in_doubt:
            for repeat in range(1, self.load.repeats):
                self.at(regime, rate, repeat)
        print()

    def plan(self, regime: Regime) -> list[float]:
        """Measure one request alone, then look for the knee; the rates to measure."""
        lone = self.bench.alone(regime)
        self.lone[regime] = lone
        name = name_of(regime)
        print(f"{name}: one request alone takes {1e3 * lone:,.0f} ms")
        print(f"{name}, delivered:", end="")
        for burst in ("first", "second"):
            self.at(regime, INF, burst)
            self.guesses[regime] = self.last_delivered(regime)
        print()

        while rate := self.missing(regime):
            self.judge(regime, rate)
        measured = set(self.table_of(regime).rate)
        rates = sorted(measured - {INF})
        return [*spread(rates, self.load.rates), INF]

    def missing(self, regime: Regime) -> float | None:
        """The rate that's still needed to enclose the knee (`next_rate`)."""
        table = self.table_of(regime)
        return next_rate(table, self.guesses[regime])

    def repeats_at(self, regime: Regime, rate: float) -> int:
        """How often a rate is measured: `load.repeats` times near the knee, else once less."""
        last, above = kept_up(self.table_of(regime))
        is_near = last / NEAR <= rate <= above < INF
        if is_near:
            return self.load.repeats
        return max(1, self.load.repeats - 1)

    def measure_again(self, regime: Regime, repeat: int) -> None:
        """Measure the rates once more that contradict themselves."""
        table = self.table_of(regime, guesses_too=False)
        for rate in noisy(table):
            print(f"{at_rate(regime, rate)} is noisy, so once more:", end="")
            self.at(regime, rate, repeat)
            print()

    def close(self, regime: Regime) -> None:
        """Where the repeats have moved the knee, measure what's now missing around it."""
        while rate := self.missing(regime):
            print(f"{name_of(regime)}, delivered:", end="")
            for repeat in range(self.load.repeats):
                self.at(regime, rate, repeat)
            print()


def sweep(client: Runner, options: Options, load: Load, folder: str | Path) -> list[Measurement]:
    """Measure every regime at rates around its knee, up to `load.repeats` times each.

    First a few requests are sent one after the other (`alone`). Two bursts say how fast the server
    is, the second as long as a point, since a few requests don't
    fill it. Then rates are added until the knee is enclosed (`next_rate`), and further ones show
    the curve. Rates from half of what the burst was answered with send equally many requests,
    because latencies grow with the number beyond the knee. What contradicts itself
    (`results.noisy`) is measured again, up to `load.again` times.

    Returns:
      the measurements, without the bursts that only served to guess.

    Raises:
      UserError: one of `measure`. What is finished is kept in `folder`.
    """
    bench = Bench(client, options, load, folder)
    points = _Sweep(bench)
    plans = {}
    repeats = {}
    for regime in load.regimes:
        plans[regime] = points.plan(regime)
        for rate in plans[regime]:
            repeats[regime, rate] = points.repeats_at(regime, rate)
    for repeat in range(load.repeats):  # all rates once per repeat: a slow change shows as spread
        print(f"round {repeat + 1} of {load.repeats}, delivered:", end="")
        for regime, rates in plans.items():
            for rate in rates:
                if repeat < repeats[regime, rate]:
                    points.at(regime, rate, repeat)
        print()

    for repeat in range(load.repeats, load.repeats + load.again):
        for regime in plans:
            points.measure_again(regime, repeat)
    for regime in plans:
        points.close(regime)

    kept = []
    for (_, _, name), measurement in points.made.items():
        if isinstance(name, int):  # the bursts that only served to guess have words
            kept.append(measurement)
    return kept


def _long_run(bench: Bench, part: pd.DataFrame, regime: Regime, rate: float) -> LongRun:
    """One long run at a rate, and a second one if noise disturbed the first.

    Args:
      part: the rows of the regime, of `results.rows`.
      rate: requests per second.
    """
    load = bench.load
    at_this_rate = part[part.rate == rate]
    latency = at_this_rate.e2el_p50_ms.median() / 1e3  # in seconds
    lone = at_this_rate.lone_ms.iloc[0] / 1e3
    seconds = max(load.long, 20 * latency)
    requests = math.ceil(rate * seconds)
    point = Point(regime, rate, requests)
    for name in ("long", "long-again"):
        measured = bench.measure(point, name)
        measurement = replace(measured, lone=lone)
        table = rows([measurement], load.slo)
        delivered = float(table.delivered_rps.iloc[0])
        answered = measurement.completed / (measurement.completed + measurement.failed)
        share = answered * share_kept(measurement, load.slo)  # no failed request kept it
        disturbed = is_contradicted(rate, delivered, part)
        overloaded = is_overloaded(rate, delivered)

        more = ""
        if disturbed:
            more = ", less than it has shown that it can: something else took the machine"
        elif overloaded:
            more = ": overloaded"
        if measurement.failed:
            more += f" ({measurement.failed} of {point.requests} requests failed)"
        name_of_point = at_rate(regime, rate)
        print(f"{name_of_point} for {measurement.duration:.0f} s: {share:.0%} within the "
              f"objective, {rounded(delivered):g}/s delivered{more}")
        if not disturbed:
            break
    held = share >= KEPT and not overloaded
    return LongRun(regime, rate, measurement, share, held)


def confirm(
        client: Runner,
        options: Options,
        load: Load,
        folder: str | Path,
        table: pd.DataFrame) -> list[LongRun]:
    """Long runs that find the rate that may be promised, of each regime.

    The first is at the largest rate that is `within` the objective. A rate that doesn't hold for
    `load.long` seconds, or 20 latencies, gives way to the next lower one, so only the last run of a
    regime can have held. A run that noise disturbed is made once more before it counts.

    Args:
      table: of `rows`; the others are as for `Bench`.
    """
    bench = Bench(client, options, load, folder)
    runs = []
    for regime, part in table.groupby(["input_len", "output_len"]):
        good = within(part)
        rates = good.index[good]
        for rate in sorted(rates, reverse=True):
            run = _long_run(bench, part, regime, rate)
            runs.append(run)
            if run.held:
                break
    return runs
