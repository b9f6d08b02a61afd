"""Load a server with vLLM's own client, find the rate where its queue begins, and price it.

A *regime* is a prompt length and an answer length, a *point* a regime at one request rate. Each point is
measured several times; every measurement is one JSON file that is kept and read again by a later run.
"""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import subprocess
import tempfile
import zlib
from pathlib import Path

import pandas as pd

from tables.errors import UserError
from serving import server
from serving.options import LAUNCHER, ROOT, VENV
from serving.vllm_cpu import DONE

INF = math.inf
WITHIN = 1.25  # the knee is looked for until two rates this far apart enclose it
CACHED = "vllm:prefix_cache_hits_total"


@dataclasses.dataclass(frozen=True)
class Load:
    """What 06 measures."""

    regimes: tuple = ((256, 32),)  # (prompt, answer) lengths in tokens
    rates: int = 7                 # how many are seen around the knee, beside all at once
    repeats: int = 3               # measurements of each point
    seconds: float = 60.0          # at all that the server can take; a smaller rate: up to twice as long
    min_requests: int = 12         # per point, however slow the server
    long: float = 600.0            # seconds of the run that confirms a price; at the least 20 latencies
    warmups: int = 1               # requests before each point, not counted
    slo: tuple = (2000, 60)        # the objective: milliseconds to the first token, per further token


def check_prompts(path):
    """How many prompts a file has for `--dataset-name custom`: a JSON object with `prompt` per line.

    Raises:
      UserError: a line has no prompt.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines() or [""]
    for number, line in enumerate(lines, 1):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["prompt"]:
                continue
        raise UserError(f"{path}, line {number}: no prompt. Each line is {{\"prompt\": \"...\"}}.")
    return len(lines)


# -- One measurement ---------------------------------------------------------------------------------------

class Client(contextlib.AbstractContextManager):
    """`vllm bench serve` for a recorded server, also for one in a container: it only sends HTTP.

    One process of vLLM's CPU build does all runs, because importing vLLM takes ten seconds on two cores.

    Attributes:
      record: the running server's; another one may take its place.
    """

    def __init__(self, folder):
        self.record, self.log, self.process = server.current(folder), Path(folder) / "client.log", None

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End the process, if there is one. It also ends with this one: its input is a pipe."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, arguments):
        """Run `vllm <arguments>` and return the JSON that it saves.

        Raises:
          UserError: it failed; its last lines.
        """
        with tempfile.TemporaryDirectory() as folder, open(self.log, "ab", buffering=0) as log:
            log.write(f"\n$ vllm {shlex.join(arguments)}\n".encode())
            if self.process is None:
                server.prepare("bash", "setup.sh", "serve")
                self.process = subprocess.Popen(
                    [VENV / "python", LAUNCHER, "--lines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=log, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            path = Path(folder) / "result.json"
            more = ["--result-dir", folder, "--result-filename", path.name]
            with contextlib.suppress(BrokenPipeError):  # it has died: its exit status says so below
                self.process.stdin.write(json.dumps([*arguments, *more]).encode() + b"\n")
                self.process.stdin.flush()
            for line in self.process.stdout:
                if line.decode().strip() == DONE:
                    return json.loads(path.read_text())
                log.write(line)
        code, self.process = self.process.wait(), None
        raise UserError(f"vllm bench serve failed ({code}):\n{server.last_lines(self.log)}")


def arguments(record, load, regime, rate, requests, seed, prompts=None):
    """The arguments of `vllm` for one point at the server of `record`.

    Args:
      regime: (prompt, answer) lengths. With `prompts` only the answer's counts: the most it may have.
      rate: requests per second, or inf.
      prompts: a file from which the requests come; answers end where they end. Nothing is sent before
        them: it would be the first of them, which a prefix cache then knows.
    """
    source = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len",
              str(regime[1]), "--skip-chat-template", "--disable-shuffle", "--num-warmups", "0",
              "--ready-check-timeout-sec", "0"] if prompts else \
        ["--dataset-name", "random", "--random-input-len", str(regime[0]), "--random-output-len",
         str(regime[1]), "--ignore-eos", "--num-warmups", str(load.warmups)]
    return ["bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
            "--base-url", record["base_url"], "--model", record["name"], "--tokenizer", record["model"],
            *source, "--request-rate", str(rate), "--num-prompts", str(requests), "--seed", str(seed),
            "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--metric-percentiles", "50,90,99", "--goodput", f"ttft:{load.slo[0]}", f"tpot:{load.slo[1]}",
            "--disable-tqdm", "--save-result", "--save-detailed"]


def measure(client, options, load, folder, regime, rate, requests, repeat, prompts=None):
    """One measurement on an idle server: its stored result, if it is of the same, else a new one.

    Args:
      client: a `Client` of a server of these options.
      folder: of the results; each is `<prompt>-<answer>_<rate>_<repeat>.json`.
      repeat: a number, or a word for a measurement beside the repeats.
      prompts: a file of the reader's own requests (`check_prompts`).

    Raises:
      UserError: the server is not idle or has died; the client failed; or no request was answered.
    """
    name = f"{regime[0]}-{regime[1]}_{rate:g}_{repeat}"
    made_by = {**options.measured(), "requests": requests, "cores": 0 if options.chip else os.cpu_count()}
    made_by |= {"prompts": zlib.crc32(Path(prompts).read_bytes())} if prompts else {"warmups": load.warmups}
    path = Path(folder) / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())
        if kept["series"]["made_by"] == made_by and kept["completed"]:
            return kept
    seed = zlib.crc32(name.encode())  # another one for each: equal seeds send equal prompts
    before = server.wait_idle(client.record)
    result = client.run(arguments(client.record, load, regime, rate, requests, seed, prompts))
    after = server.counters(client.record)
    if not result.get("completed"):
        said = next((error for error in result.get("errors", []) if error), "no error text")
        raise UserError(f"none of {requests} requests was answered: {said.strip().splitlines()[-1][:200]}")
    result["series"] = {
        "made_by": made_by, "input_len": regime[0], "output_len": regime[1], "repeat": repeat,
        "speculation": server.acceptance(before, after),
        "cached_tokens": after[CACHED] - before[CACHED]}
    beside = path.with_suffix(".partial")
    beside.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(json.dumps(result))
    beside.replace(path)
    return result


# -- The sweep ---------------------------------------------------------------------------------------------

def bracket(kept, guess):
    """The rates that were tried until two neighbours, at most `WITHIN` apart, enclose the knee.

    Args:
      kept: rate -> True if the server keeps up with it.
      guess: requests per second that it is thought to manage.

    Returns:
      list of rates, ascending; the knee is between the last one kept and the next.
    """
    tried = {}

    def keeps(rate):
        rate = float(f"{rate:.3g}")
        tried[rate] = tried[rate] if rate in tried else bool(kept(rate))
        return tried[rate]

    low, high = 0.6 * guess, 1.4 * guess
    while not keeps(low) and len(tried) < 6:
        low, high = low / 2, low
    while keeps(high) and len(tried) < 12:
        low, high = high, high * 1.6
    while high / low > WITHIN:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return sorted(tried)


def spread(rates, count):
    """The same rates and more, until there are `count`: half the smallest, then the widest gaps' middles."""
    rates = sorted(rates)
    if len(rates) < count:
        rates = [float(f"{rates[0] / 2:.3g}"), *rates]
    while len(rates) < count:
        place = max(range(1, len(rates)), key=lambda k: rates[k] / rates[k - 1])
        rates.insert(place, float(f"{math.sqrt(rates[place - 1] * rates[place]):.3g}"))
    return rates


def sweep(client, options, load, folder):
    """Measure every regime at rates around its knee, each `load.repeats` times; returns the results.

    Two bursts say how fast the server is, the second as long as a point, since a few requests do not
    fill it; bisection encloses the knee, and further rates show the curve. Rates from half of what the
    burst was answered with send equally many requests, because latencies grow with the number beyond
    the knee.

    Raises:
      UserError: one of `measure`. What is finished is kept in `folder`.
    """
    found, plans, guesses = {}, {}, {}

    def at(regime, rate, repeat):
        key = regime, rate, repeat
        if key not in found:
            requests = load.seconds * min(2 * rate, guesses.get(regime, 0)) or 2 * load.min_requests
            found[key] = measure(client, options, load, folder, regime, rate,
                                 max(load.min_requests, math.ceil(requests)), repeat)
            delivered = table_of(regime).delivered_rps.iloc[-1]
            print(f"{regime[0]}/{regime[1]} at {rate:.3g}/s: {delivered:.3g}/s delivered")

    def table_of(regime):
        return rows([result for (one, *_), result in found.items() if one == regime], load.slo)

    for regime in load.regimes:
        for burst in ("first", "second"):
            at(regime, INF, burst)
            guesses[regime] = table_of(regime).delivered_rps.iloc[-1]

        def kept(rate, regime=regime):
            at(regime, rate, 0)
            return kept_up(table_of(regime))[0] >= rate
        plans[regime] = [*spread(bracket(kept, guesses[regime]), load.rates), INF]
    for repeat in range(load.repeats):  # all rates once per repeat: a slow change shows as spread
        for regime, rates in plans.items():
            for rate in rates:
                at(regime, rate, repeat)
    return [result for (*_, repeat), result in found.items() if repeat in range(load.repeats)]


def confirm(client, options, load, folder, table):
    """One long run at the rate that may be promised, of each regime: {regime: (rate, result)}.

    It begins at the largest rate that is `within` the objective. A rate that does not hold for
    `load.long` seconds, or 20 latencies, gives way to the next lower one. A regime of which no rate
    holds is left out.

    Args:
      table: of `rows`; the others are as for `measure`.
    """
    found = {}
    for regime, part in table.groupby(["input_len", "output_len"]):
        good = within(part)
        for rate in sorted(good.index[good], reverse=True):
            latency = part[part.rate == rate].e2el_p50_ms.median() / 1e3
            requests = math.ceil(rate * max(load.long, 20 * latency))
            result = measure(client, options, load, folder, regime, rate, requests, "long")
            kept, delivered = share_kept(result, load.slo), rows([result], load.slo).delivered_rps[0]
            print(f"{regime[0]}/{regime[1]} at {rate:.3g}/s for {result['duration']:.0f} s: {kept:.0%} "
                f"within the objective, {delivered:.3g}/s delivered")
            if kept >= 0.9 and delivered >= 0.9 * rate:
                found[regime] = rate, result
                break
    return found


# -- What a measurement says -------------------------------------------------------------------------------

def answered(result):
    """One row per completed request: start, ttft, latency (seconds), tokens."""
    rows = zip(result["start_times"], result["ttfts"], result["latencies"], result["output_lens"],
               result["errors"], strict=True)
    return pd.DataFrame([row[:4] for row in rows if not row[4]],
                        columns=["start", "ttft", "latency", "tokens"])


def delivered_rate(result, lone):
    """Completed requests per second, corrected for both ends of the run.

    A server that keeps up idles away the end of a run: its last request still takes `lone` seconds,
    the shortest latency of a request that was seen, while nothing arrives any more. Those seconds
    are no time of load. A server with a queue is busy to the end, and the more so the less of the
    run saw arrivals: `lone` counts by that share.

    At the start it is the other way round. The client waits one random gap before its first
    request too, so n requests take n gaps, and who keeps up needs all of them. A server with a
    queue was only kept from its work: the first gap, the `lead`, is taken out for it.

    It errs on the low side, by up to a fifth near the limit of a run that is a few latencies long
    (simulated in the tests), and never says more than the server can do.
    """
    starts = result["start_times"]
    ends = [start + took for start, took in zip(starts, result["latencies"], strict=True)]
    sending = max(starts) - min(starts)
    lead = max(0.0, result["duration"] - (max(ends) - min(starts)))
    share = min(1.0, sending / max(result["duration"] - lead - lone, 1e-9))
    return result["completed"] / (result["duration"] - lone * share - lead * (1 - share))


def share_kept(result, slo):
    """Share of the completed requests whose times kept the objective (TTFT and TPOT, in ms).

    A client short of CPU reads tokens late, and several at once: TTFT is then too long, TPOT too short.
    Who passes all the same had the last token no later than the objective promises it.
    """
    done = answered(result)
    tpot = (done.latency - done.ttft) / (done.tokens - 1).clip(lower=1)
    return float(((1e3 * done.ttft <= slo[0]) & (1e3 * tpot <= slo[1])).mean())


def rows(results, slo, dollars_per_hour=math.nan):
    """results.csv, a row per measurement: what was delivered, latencies in ms, goodput and cost.

    Args:
      slo: as in `Load`.
      dollars_per_hour: of all chips; nan where nobody has a price.
    """
    table = pd.DataFrame([{
        "input_len": r["series"]["input_len"], "output_len": r["series"]["output_len"],
        "rate": float(r["request_rate"]), "repeat": r["series"]["repeat"],
        "requests": r["num_prompts"], "failed": r["failed"]} for r in results])
    shortest = pd.Series([answered(r).latency.min() for r in results])
    lone = shortest.groupby([table.input_len, table.output_len]).transform("min")
    lone = lone.where(table.rate < INF, 0.0)  # a burst keeps the server busy to its end
    table["delivered_rps"] = [*map(delivered_rate, results, lone)]
    for kind in ("ttft", "tpot", "itl", "e2el"):
        for p in (50, 90, 99):
            table[f"{kind}_p{p}_ms"] = [r[f"p{p}_{kind}_ms"] for r in results]
    table["goodput_rps"] = table.delivered_rps * [share_kept(r, slo) for r in results]
    table["in_flight"] = [sum(r["latencies"]) / r["duration"] for r in results]
    table["output_tok_s"] = table.delivered_rps * [r["total_output_tokens"] / r["completed"] for r in results]
    table["cached_tokens"] = [r["series"]["cached_tokens"] for r in results]
    table["dollars_per_hour"] = dollars_per_hour
    table["hours_per_million_output"] = 1e6 / table.output_tok_s / 3600
    table["usd_per_million_output"] = table.hours_per_million_output * dollars_per_hour
    return table


def kept_up(part):
    """The knee of one regime: (last rate that was kept up with, the next one that was seen).

    Kept up with: in the middle of its repeats at least 90 % of the rate, and of every smaller one, was
    delivered, and it is no more than the most that was ever delivered: a rate 8 % above the limit is
    delivered to 92 %, and its queue grows for ever.

    The last is 0 if even the smallest was too much; the next is at most inf, all at once.
    """
    middle = part.groupby("rate").delivered_rps.median()
    fine = (middle >= 0.9 * middle.index) & (middle.index <= 1.02 * part.delivered_rps.max())
    below = fine.cummin()
    last = max(below.index[below], default=0.0)
    return last, min((rate for rate in middle.index if rate > last), default=INF)


def within(part):
    """By rate of one regime: True up to the knee where, in the middle of the repeats, nine requests in
    ten kept the objective.

    A request counts only if its TTFT *and* its TPOT were within it: two p90s that are each within it may
    leave out 20 % of the requests.
    """
    share = (part.goodput_rps / part.delivered_rps).groupby(part.rate).median()
    return (share >= 0.9) & (share.index <= kept_up(part)[0])
