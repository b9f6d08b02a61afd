"""Judge a Verilog module that a language model wrote, by verilog-eval's rules, without trusting it.

A problem is three files, `<name>_prompt.txt`, `<name>_ref.sv` (RefModule) and `<name>_test.sv` (tb).
The candidate is compiled with the two, and what the compiler made of it is inspected before it runs:
every system call, scope and driver stands in Icarus's output with the file it came from, after all
macros, comments and tricks of spelling are gone.
"""

import contextlib
import functools
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from helpers.run import Progress, UserError

CATEGORIES = ("pass", "mismatch", "timeout", "runtime", "compile", "syntax", "refused", "no code")
REPOSITORY = "https://github.com/NVlabs/verilog-eval"
COMMIT = "c498220d0a52248f8e3fdffe279075215bde2da6"
MISMATCH_LINE = re.compile(r"^Mismatches: (\d+) in (\d+) samples$")


@dataclass(frozen=True)
class Limits:
    """What one compilation, and one simulation, may use.

    Attributes:
      seconds: of CPU time, and three times that of wall clock. (verilog-eval: 30 of wall clock; a
        simulator never sleeps, and a busy machine must not turn a pass into a timeout.)
      memory: bytes of address space.
      output: bytes printed; more ends the process.
      file: bytes of any file the compiler writes (the simulation may write none).
    """

    seconds: float = 30.0
    memory: int = 1 << 30
    output: int = 1 << 20
    file: int = 64 << 20


@dataclass(frozen=True)
class Problem:
    """One verilog-eval problem; `interface` is the module header that code-complete problems have."""

    name: str
    prompt: str
    reference: str
    testbench: str
    interface: str = ""

    @property
    def missing(self):
        """The files the folder lacks, for example ['_test.sv']."""
        parts = {"_prompt.txt": self.prompt, "_ref.sv": self.reference, "_test.sv": self.testbench}
        return [suffix for suffix, text in parts.items() if not text.strip()]


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate.

    Attributes:
      category: one of `CATEGORIES`.
      detail: one line: why.
      mismatches: samples that differed from the reference (None: the testbench did not get there).
      samples: samples compared.
      log: the compiler's and the simulator's output, as verilog-eval's analyser would read it.
      seconds: time this took.
    """

    category: str
    detail: str = ""
    mismatches: int | None = None
    samples: int | None = None
    log: str = ""
    seconds: float = 0.0

    @property
    def passed(self):
        """True for the category pass and nothing else."""
        return self.category == "pass"


def fetch(folder, repository=REPOSITORY, commit=COMMIT):
    """A folder of verilog-eval; one commit of the repository is fetched around it if it is missing.

    `{checkout}` in its name stands for `VERILOG_EVAL_DIR`, or without it for `runs/verilog-eval`."""
    checkout = os.environ.get("VERILOG_EVAL_DIR") or "runs/verilog-eval"
    folder = Path(str(folder).format(checkout=checkout))
    if not folder.is_dir():
        target = folder.parent
        for words in (["init", "-q", target], ["-C", target, "fetch", "-q", "--depth=1", repository,
                      commit], ["-C", target, "checkout", "-q", "FETCH_HEAD"]):
            if subprocess.run(["git", *map(str, words)]).returncode:
                raise UserError(f"{repository} could not be fetched. Put a checkout at {target}.")
    return folder


def load_problems(folder):
    """The problems in a verilog-eval dataset folder, by name. An incomplete one is kept and counted.

    Raises:
      UserError: there is no problem in it.
    """
    folder, suffixes = Path(folder), ("_prompt.txt", "_ref.sv", "_test.sv")
    names = sorted({path.name.removesuffix(suffix) for suffix in suffixes
                    for path in folder.glob(f"*{suffix}")})
    if not names:
        raise UserError(f"{folder} holds no verilog-eval problem (*_prompt.txt, *_ref.sv, *_test.sv).")

    def read(name, suffix):
        path = folder / f"{name}{suffix}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    return [Problem(name, *(read(name, suffix) for suffix in (*suffixes, "_ifc.txt")))
            for name in names]


@functools.cache
def icarus_version():
    """Icarus Verilog's version as a tuple, for example (11, 0).

    Raises:
      UserError: it is not installed.
    """
    if not (shutil.which("iverilog") and shutil.which("vvp")):
        raise UserError("Icarus Verilog (iverilog, vvp) is missing. "
                        "Run: sudo apt-get install -y iverilog")
    answer = subprocess.run(["iverilog", "-V"], capture_output=True, text=True)
    found = re.search(r"Icarus Verilog version (\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, found.groups())) if found else (0, 0)


# ---- From a model's answer to code ----

FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.M)
MODULE = re.compile(r"^[ \t]*module\s+\w+\s*(?:#|\(|;|$|import\b)", re.M)


def extract_code(text, interface=""):
    """Find the Verilog in a model's answer; returns (code or None, how it was found).

    A thought channel or `<think>` block before the answer is cut off. Then, in this order: the last
    `<answer>`, text between verilog-eval's [BEGIN] and [DONE], fenced blocks, bare text from the
    first `module` to the last `endmodule`. Of several blocks the last one that defines TopModule
    counts (drafts come first, the answer after them), else the last that defines any module.
    Nothing is repaired: no module is renamed, closed or put together from pieces.

    Args:
      text: the answer.
      interface: the header a code-complete problem gives; as in verilog-eval, an answer without a
        module is then taken for the body of that one.
    """
    for opening, closing in (("<|channel>", "<channel|>"), ("<think>", "</think>")):
        if closing in text:
            text = text.rsplit(closing, 1)[1]
        elif opening in text:
            return None, "thought never ends"
    for opening, closing in (("<answer>", "</answer>"), ("[BEGIN]", "[DONE]")):
        if opening in text:
            text = text.rsplit(opening, 1)[1].split(closing, 1)[0]
    fences = list(FENCE.finditer(text))
    ends = [fence.start() for fence in fences[1::2]] + [len(text)] * (len(fences) % 2)
    blocks = [text[start.end():end].strip("\n")
              for start, end in zip(fences[::2], ends, strict=True)]
    with_module = [block for block in blocks if MODULE.search(block)]
    top = [block for block in with_module if re.search(r"\bmodule\s+TopModule\b", block)]
    if with_module:
        chosen = (top or with_module)[-1]
        if len(fences) % 2 and chosen == blocks[-1]:
            return chosen, "unclosed fence"
        return chosen, "fence" if len(blocks) == 1 else f"last module of {len(blocks)} fences"
    start, end = MODULE.search(text), text.rfind("endmodule")
    if start and end > start.start():
        return text[start.start():end + len("endmodule")], "no fence"
    body = blocks[-1] if blocks else text
    if interface and body.strip():
        return f"{interface}\n{body}", "body of the given header"
    return None, "no module"


# ---- Running a program that may do anything ----

@functools.cache
def network_guard():
    """Command words that cut a program off the network, or an empty tuple where that is not allowed."""
    for words in (("unshare", "-n", "--"), ("unshare", "-rn", "--")):
        if shutil.which(words[0]) and not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    return ()


_LIMITED = """ulimit -c 0; ulimit -t $1; ulimit -v $2 2>/dev/null; ulimit -f $3
[ "$4" = 0 ] || ulimit -u 0 2>/dev/null || ulimit -p 0 2>/dev/null
shift 4; exec "$@" """


def run_limited(command, folder, limits, file=None, alone=False):
    """Run a command under `limits` in a session of its own, without network where that is possible.

    Args:
      command: list of words.
      folder: working directory, and the only place for temporary files.
      limits: `Limits`.
      file: bytes of any file it writes; default `limits.file`.
      alone: True forbids it to start further processes (without effect for root).

    Returns:
      (output, exit status, None or "time" or "output": the limit that ended it).
    """
    blocks = -(-(limits.file if file is None else file) // 512)
    words = [*network_guard(), "/bin/sh", "-c", _LIMITED, "sh", str(math.ceil(limits.seconds)),
             str(limits.memory // 1024), str(blocks), str(int(alone)), *command]
    environment = {"PATH": os.environ.get("PATH", ""), "TMPDIR": str(folder), "LC_ALL": "C"}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    start, output, ended = time.monotonic(), b"", None
    deadline = start + 3 * limits.seconds
    try:
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while ended is None:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    ended = "time"
                    break
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                output += chunk
                if len(output) > limits.output:
                    ended = "output"
        if ended is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() != 0 and time.monotonic() - start > 0.95 * limits.seconds:
                ended = "time"  # still there, or it or a child of it ran out of CPU time
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return output[:limits.output].decode("utf-8", "replace"), process.returncode, ended


# ---- verilog-eval's rules ----

# A line with one of these decides, before any mismatch count (the official analyser's order).
_DECIDES = (
    ("syntax error", "syntax"),
    ("error: This assignment requires an explicit cast", "compile"),
    ("error: Sized numeric constant must have a size greater than zero", "compile"),
    ("warning: always_comb process has no sensitivities", "compile"),
    ("found no sensitivities so it will never trigger", "compile"),
    ("is declared here as wire", "compile"),
    ("Unknown module type", "compile"),
    ("Unable to bind wire/reg/memory `clk'", "compile"),
    ("TIMEOUT", "timeout"),
)
_CONDEMNS = ("Unable to bind wire/reg", "error")  # fails too, when no line above decides


def analyse(log):
    """Apply the official analyser's rules to a log: (category, the line that decided, count or None).

    The count is (mismatches, samples) of the last `Mismatches:` line. Without one the category is
    runtime; like the official analyser, this passes a log in which any such line says 0.
    """
    decided, condemned, clean, count = None, "", False, None
    for line in log.replace("\r", "\n").split("\n"):
        if found := MISMATCH_LINE.match(line):
            count = int(found[1]), int(found[2])
        if decided:
            continue
        decided = next(((kind, line.strip()) for text, kind in _DECIDES if text in line), None)
        if not condemned and any(text in line for text in _CONDEMNS):
            condemned = line.strip()
        clean = clean or bool(found) and count[0] == 0
    if decided or condemned:
        return *(decided or ("compile", condemned)), count
    if clean:
        return "pass", "", count
    if count:
        return "mismatch", f"{count[0]} of {count[1]} samples differ", count
    return "runtime", "the testbench never reported", count


# ---- What the compiler made of a candidate ----

_HARMLESS = frozenset("$" + name for text in ("display", "write", "strobe", "monitor")
                      for name in (text, text + "b", text + "h", text + "o")) | frozenset(
    "$error $warning $info $sformat $sformatf $swrite $swriteb $swriteh $swriteo $time $stime "
    "$realtime $signed $unsigned $bits $clog2 $countones $countbits $onehot $onehot0 $isunknown "
    "$size $left $right $low $high $increment $dimensions $unpacked_dimensions $rtoi $itor "
    "$realtobits $bitstoreal $shortrealtobits $bitstoshortreal $ln $log10 $exp $sqrt $pow $floor "
    "$ceil $sin $cos $tan $asin $acos $atan $atan2 $hypot $sinh $cosh $tanh $asinh $acosh $atanh "
    "$abs $min $max $cast".split())
_METHOD = re.compile(r"\$ivl_\w*method\$\w+$")  # what Icarus makes of x.size() and enum.next()
_CALL = re.compile(r'(?:L_\S+ +)?(?:%vpi_call|%vpi_func|\.sfunc)\S* +(\d+) +\d+ +"([^"]*)"')
_SCOPE = re.compile(r'(S_\w+) \.scope (\w+), "(?:[^"\\]|\\.)*" "((?:[^"\\]|\\.)*)" (\d+) \d+'
                    r'(?:, (\d+) \d+)?')
_PORT = re.compile(r'\.port_info \d+ /(\w+) \d+ "((?:[^"\\]|\\.)*)"')
_NET = re.compile(r'v\w+ \.net\S* "((?:[^"\\]|\\.)*)", .*?(\d+) drivers')


def inspect_program(program, testbench, reference):
    """Say why a compiled program (Icarus's vvp text) must not run or count; None where it may.

    Args:
      program: the text of the compiled file.
      testbench, reference: names of the two trusted files in it; all else is the candidate's.
    """
    head, _, table = program.rpartition("\n:file_names ")
    names = re.findall(r'^    "(.*)";$', table, re.M)
    if testbench not in names or reference not in names:
        return "the compiled program does not name its sources"
    trusted, guarded = {names.index(testbench), names.index(reference)}, names.index(reference)
    owners, kinds, directions, drivers = {}, {}, {}, {}
    scope = None
    for line in head.split("\n"):
        text = line.lstrip()
        if text.startswith((".scope ", "S_")):
            if found := _SCOPE.match(text):
                scope = found[1]
                owners[scope], kinds[scope] = int(found[5] or found[4]), found[3]
            else:
                scope = text.split()[1].rstrip(";") if text.startswith(".scope ") else scope
            continue
        if "%vpi_" in text[:8] or ".sfunc" in text[:40]:
            call = _CALL.match(text)
            if call is None:
                return f"unreadable system call: {text[:80]}"
            if int(call[1]) not in trusted and not (call[2] in _HARMLESS or _METHOD.match(call[2])):
                return f"calls {call[2]}"
        if text.startswith(("%force", "%release")) and owners.get(scope) not in trusted:
            return "forces a signal"
        if text.startswith(".thread") and "$final" in text and owners.get(scope) not in trusted:
            return "has a final block"
        if text.startswith(".port_info") and (port := _PORT.match(text)):
            directions.setdefault(kinds.get(scope), {})[port[2]] = port[1]
        if owners.get(scope) == guarded and (net := _NET.match(text)):
            drivers[net[1]] = max(int(net[2]), drivers.get(net[1], 0))
    wanted, given = directions.get("RefModule", {}), directions.get("TopModule", {})
    for name, direction in wanted.items():
        if direction == "INPUT" and given.get(name, "INPUT") != "INPUT":
            return f"declares the input {name} as {given[name].lower()}"
        if direction == "INPUT" and drivers.get(name, 1) > 1:
            return f"drives the input {name}"
    return None


# ---- Judging ----

def judge(problem, code, limits=Limits(), waves=None):
    """Judge one candidate; never raises for what the candidate does.

    Args:
      problem: a `Problem`.
      code: Verilog text, or None where the model wrote none.
      limits: `Limits` of the compilation and of the simulation.
      waves: where to put the waveform file (VCD), if one is wanted.

    Returns:
      A `Verdict`.
    """
    icarus_version()
    start = time.perf_counter()
    if code is None or not code.strip():
        return Verdict("no code", "the answer holds no module")
    if problem.missing:
        return Verdict("compile", f"the problem's own files are missing: {', '.join(problem.missing)}")
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        category, detail, count, log = _judge_in(Path(folder), problem, code, limits, waves)
    mismatches, samples = count or (None, None)
    return Verdict(category, detail, mismatches, samples, log, time.perf_counter() - start)


def _judge_in(folder, problem, code, limits, waves):
    secret = secrets.token_hex(8)  # names, and a mark on the testbench's own line, nobody can guess
    testbench, reference = f"test{secret}.sv", f"ref{secret}.sv"
    plain, marked = '"Mismatches: ', f'"{secret}Mismatches: '
    if plain not in problem.testbench:
        return "compile", "the problem's testbench prints no Mismatches line", None, ""
    if re.search(r"`\s*(?:include|line)\b", _without_comments(code)):
        return "refused", "names another file (`include or `line)", None, ""
    (folder / "top.sv").write_text(code, encoding="utf-8", errors="replace")
    (folder / testbench).write_text(problem.testbench.replace(plain, marked), encoding="utf-8")
    (folder / reference).write_text(problem.reference, encoding="utf-8")
    compiled, status, ended = run_limited(
        ["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012", "-s", "tb", "-Mall=files",
         "-o", "program", "top.sv", testbench, reference], folder, limits)
    log = compiled.replace(secret, "")
    if ended:
        return _ended(ended, "compiling", limits, log)
    program = folder / "program"
    if status or not program.exists():
        category, detail, _ = analyse(log)
        return ("compile", f"iverilog ended with {status}: {detail}", None, log) \
            if category in ("pass", "mismatch", "runtime") else (category, detail, None, log)
    files = (folder / "files").read_text(errors="replace").split("\n")
    if [name for name in files if name] != ["top.sv", testbench, reference]:
        return "refused", "reads another file", None, log
    reason = inspect_program(program.read_text(errors="replace"), testbench, reference) \
        or ("drives an input" if "is coerced to inout" in compiled else None)
    if reason:
        return "refused", reason, None, log
    wave = [] if waves else ["-none"]
    printed, status, ended = run_limited(["vvp", "-n", "program", *wave], folder, limits,
                                         file=limits.file if waves else 0, alone=True)
    if waves and (folder / "wave.vcd").exists():
        shutil.copyfile(folder / "wave.vcd", waves)
    if any(MISMATCH_LINE.match(line) for line in (compiled + printed).splitlines()):
        return "refused", "prints the testbench's own line", None, log + printed.replace(secret, "")
    log += printed.replace(secret, "")
    if ended:
        return _ended(ended, "simulating", limits, log)
    category, detail, count = analyse(log)
    if category == "pass" and (count[1] == 0 or status):
        return "runtime", f"no sample compared, or vvp ended with {status}", count, log
    if category == "pass" and (reason := _leans_on_others(folder, limits)):
        return "refused", reason, count, log
    return category, detail, count, log


def _ended(limit, phase, limits, log):
    if limit == "time":
        return "timeout", f"{phase} took over {limits.seconds:g} s", None, log + "\nTIMEOUT\n"
    return "runtime", f"{phase} printed over {limits.output} bytes", None, log


def _leans_on_others(folder, limits):
    """A module that reaches testbench or reference by name cannot be compiled alone: why, or None."""
    printed, status, _ = run_limited(
        ["iverilog", "-g2012", "-s", "TopModule", "-o", "alone", "top.sv"], folder, limits)
    lines = [line for line in printed.splitlines() if "error" in line or " not found" in line]
    if status or any("not found" in line for line in lines):
        return f"works only inside the testbench: {(lines or ['killed'])[0]}"
    return None


def _without_comments(code):
    pattern = r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"'
    return re.sub(pattern, " ", code, flags=re.S)


def judge_many(candidates, limits=Limits(), workers=None, text="judging"):
    """Judge many (problem, code) pairs in parallel; identical ones once.

    Args:
      candidates: list of (Problem, code or None).
      limits: `Limits`.
      workers: threads, each waiting for one simulator; default one per core.
      text: the first word of the progress line.

    Returns:
      A list of `Verdict`, in the order given.
    """
    icarus_version()
    network_guard()
    different = list(dict.fromkeys(candidates))
    progress, verdicts = Progress(len(different), text), {}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        pending = {pool.submit(judge, *candidate, limits): candidate for candidate in different}
        for done in as_completed(pending):
            verdicts[pending[done]] = done.result()
            progress.update(note=f"{sum(v.passed for v in verdicts.values())} pass")
    return [verdicts[candidate] for candidate in candidates]


# ---- Waveforms ----

def read_vcd(path, limit=4 << 20):
    """Read a waveform file: {signal: [(time, value as a string of 0 1 x z, one per bit), ...]}.

    Of several values at one time only the last, the settled one, is kept.
    """
    text = Path(path).read_text(errors="replace")[:limit]
    signals, changes, now = {}, {}, 0
    head, _, body = text.partition("$enddefinitions")
    for width, key, name in re.findall(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end", head):
        signals.setdefault(key, (name, int(width)))
    for line in body.splitlines():
        if line.startswith("#"):
            now = int(line[1:])
            continue
        value, _, key = line[1:].partition(" ") if line[:1] in "bB" else (line[:1], "", line[1:])
        if key in signals and set(value) <= set("01xzXZ"):
            name, width = signals[key]
            value = value.lower().rjust(width, value[0].lower() if value[0] in "xzXZ" else "0")
            events = changes.setdefault(name, [])
            if events and events[-1][0] == now:
                events.pop()
            if not events or events[-1][1] != value:
                events.append((now, value))
    return changes


def draw_waves(ax, changes, at, before=60, after=40):
    """Draw signals around time `at`: one lane each, buses with their values in hexadecimal."""
    from helpers import style
    start, end = max(0, at - before), at + after
    lanes = [name for name in changes if name != "tb_mismatch"][:12]
    lanes += ["tb_mismatch"] * ("tb_mismatch" in changes)
    for lane, name in enumerate(reversed(lanes)):
        events = [event for event in changes[name] if event[0] <= end]
        for (time_, value), (until, _) in zip(events, [*events[1:], (end, "")], strict=True):
            left, right = max(time_, start), min(until, end)
            known = set(value) <= {"0", "1"}
            if right <= left:
                continue
            if len(value) == 1 and known:
                ax.plot([left, right], [lane + 0.6 * int(value)] * 2, color=style.BLUE, linewidth=1.5)
                if left > start:
                    ax.plot([left, left], [lane, lane + 0.6], color=style.BLUE, linewidth=0.8)
                continue
            ax.fill_between([left, right], lane, lane + 0.6, linewidth=0,
                            color=style.SKY if known else "#DDDDDD")
            ax.plot([left, left], [lane, lane + 0.6], color="white", linewidth=2.5)
            shown = f"{int(value, 2):x}" if known else value[:4]
            if right - left >= 0.015 * len(shown) * (end - start):
                ax.text((left + right) / 2, lane + 0.28, shown, ha="center", va="center", fontsize=8)
    ax.axvline(at, color=style.RED, linestyle="--", linewidth=1)
    ax.set_yticks([lane + 0.3 for lane in range(len(lanes))], list(reversed(lanes)))
    ax.set(xlabel="simulation time (ps)", xlim=(start, end))
    ax.grid(False)
