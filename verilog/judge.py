"""Judge a Verilog module that a language model wrote, by verilog-eval's rules, without trusting it.

A problem is three files, `*_prompt.txt`, `*_ref.sv` (RefModule) and `*_test.sv` (tb). verilog-eval
compiles them together with the answer, so an answer can read the reference, stop the simulation or
print the winning line. Here the answer never meets them:

1. *The questions* (once per problem): testbench and reference run without any answer, and every
   change of TopModule's inputs is written down.
2. *The exam*: the answer runs alone with a bench that replays these inputs and writes down its
   outputs. There is nothing to copy: neither reference nor testbench are in this program.
3. *The marking*: testbench and reference run again, and in the answer's place stands a module that
   replays the outputs. Only this run decides, and no text of the answer is in it.
"""

import collections
import contextlib
import functools
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from helpers.run import Progress, write_text

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
      file: bytes of any file that is written.
      code: characters of an answer.
    """

    seconds: float = 30.0
    memory: int = 1 << 30
    output: int = 1 << 20
    file: int = 64 << 20
    code: int = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One verilog-eval problem; `interface` is the header that code-complete problems have."""

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
    """What became of one answer.

    Attributes:
      category: one of `CATEGORIES`.
      detail: one line: why. Equal answers have equal details.
      mismatches: samples that differed from the reference (None: the testbench did not get there).
      samples: samples compared.
      log: the compiler's output and the testbench's: what verilog-eval's analyser reads.
      printed: what the answer printed while it ran. It decides nothing.
      seconds: time this took.
    """

    category: str
    detail: str = ""
    mismatches: int | None = None
    samples: int | None = None
    log: str = ""
    printed: str = ""
    seconds: float = 0.0

    @property
    def passed(self):
        """True for the category pass and nothing else."""
        return self.category == "pass"


def fetch(folder, repository=REPOSITORY, commit=COMMIT):
    """A folder of verilog-eval; one commit of the repository is fetched around it if it is missing.

    `{checkout}` in its name stands for `VERILOG_EVAL_DIR`, by default `runs/verilog-eval`."""
    checkout = os.environ.get("VERILOG_EVAL_DIR") or "runs/verilog-eval"
    folder = Path(str(folder).format(checkout=checkout))
    if not folder.is_dir():
        target = folder.parent
        for words in (["init", "-q", target], ["-C", target, "fetch", "-q", "--depth=1", repository,
                      commit], ["-C", target, "checkout", "-q", "FETCH_HEAD"]):
            if subprocess.run(["git", *map(str, words)]).returncode:
                raise ValueError(f"{repository} could not be fetched. Put a checkout at {target}.")
    return folder


def load_problems(folder):
    """The problems in a verilog-eval dataset folder, by name. Incomplete ones are kept and counted.

    Raises:
      ValueError: there is no problem in it, or none with a reference and a testbench.
    """
    folder, suffixes = Path(folder), ("_prompt.txt", "_ref.sv", "_test.sv")
    names = sorted({path.name.removesuffix(suffix) for suffix in suffixes
                    for path in folder.glob(f"*{suffix}")})
    if not names:
        raise ValueError(f"{folder} holds no verilog-eval problem (*_prompt.txt, *_ref.sv, "
                         "*_test.sv).")

    def read(name, suffix):
        path = folder / f"{name}{suffix}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    problems = [Problem(name, *(read(name, suffix) for suffix in (*suffixes, "_ifc.txt")))
                for name in names]
    if all(problem.missing for problem in problems):
        raise ValueError(f"no problem in {folder} is complete: {names[0]} lacks "
                         f"{', '.join(problems[0].missing)}. Each needs *_prompt.txt, *_ref.sv and "
                         "*_test.sv.")
    return problems


@functools.cache
def icarus_version():
    """Icarus Verilog's version as a tuple, for example (11, 0).

    Raises:
      ValueError: it is not installed.
    """
    if not (shutil.which("iverilog") and shutil.which("vvp")):
        raise ValueError("Icarus Verilog (iverilog, vvp) is missing. "
                         "Run: sudo apt-get install -y iverilog")
    answer = subprocess.run(["iverilog", "-V"], capture_output=True, text=True)
    found = re.search(r"Icarus Verilog version (\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, found.groups())) if found else (0, 0)


# ---- Running a program that may do anything ----

@functools.cache
def network_guard():
    """Words before a command that cut it off the network; empty where that is not allowed."""
    return next((words for words in (("unshare", "-n", "--"), ("unshare", "-rn", "--"))
                 if _works(words)), ())


@functools.cache
def tether():
    """Words before a command that is to end with the process that waits for it, even by kill -9."""
    words = ("setpriv", "--pdeathsig", "KILL", "--")
    return words if _works(words) else ()


def _works(words):
    return bool(shutil.which(words[0])) and subprocess.run(
        [*words, "true"], capture_output=True).returncode == 0


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

    Raises:
      ValueError: somebody else killed it.
    """
    blocks = -(-(limits.file if file is None else file) // 512)
    words = [*tether(), *network_guard(), "/bin/sh", "-c", _LIMITED, "sh",
             str(math.ceil(limits.seconds)), str(limits.memory // 1024), str(blocks),
             str(int(alone)), *command]
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
    if ended is None and process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ValueError(f"{command[0]} was killed from outside (often: not enough memory). What is "
                        "judged so far is kept where it was saved; run this again.")
    return output[:limits.output].decode("utf-8", "replace"), process.returncode, ended


# ---- verilog-eval's rules ----

# A line with one of these decides, before any mismatch count (the official analyser's order).
_DECIDES = (
    ("syntax error", "syntax", "S"),
    ("error: This assignment requires an explicit cast", "compile", "e"),
    ("error: Sized numeric constant must have a size greater than zero", "compile", "0"),
    ("warning: always_comb process has no sensitivities", "compile", "n"),
    ("found no sensitivities so it will never trigger", "compile", "n"),
    ("is declared here as wire", "compile", "w"),
    ("Unknown module type", "compile", "m"),
    ("Unable to bind wire/reg/memory `clk'", "compile", "c"),
    ("TIMEOUT", "timeout", "T"),
)
_CONDEMNS = ("Unable to bind wire/reg", "error")  # fails too, when no line above decides


def analyse(log):
    """The official analyser's rules for a log: (category, the line that decided, count or None).

    The count is (mismatches, samples) of the last `Mismatches:` line. Without one the category is
    runtime; like the official analyser, this passes a log in which any such line says 0.
    """
    decided, condemned, clean, count = None, "", False, None
    for line in log.replace("\r", "\n").split("\n"):
        if found := MISMATCH_LINE.match(line):
            count = int(found[1]), int(found[2])
        if decided:
            continue
        decided = next(((kind, line.strip()) for text, kind, _ in _DECIDES if text in line), None)
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


# ---- The three programs: questions, exam, marking ----

_COMMENT = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_SCALE = re.compile(r"`timescale\s+\d+\s*[munpf]?s\s*/\s*(\d+)\s*([munpf]?s)")
_UNITS = ("s", "ms", "us", "ns", "ps", "fs")
_PORT = re.compile(r'\.port_info \d+ /(\w+) (\d+) "((?:[^"\\]|\\.)*)"')

# Notes the inputs: at each edge of a bit as a flip-flop sees them, else when a change has settled.
QUESTIONS = """module TopModule({ports});{unit}
  integer file = $fopen("questions.txt", "w");
  initial begin {note} {ever} begin {at_ins} #0 {note} end end
  {at_edges}
  final {note}
endmodule
"""
NOTE = '$fdisplay(file, "%0d %b", $time, {{{ins}}});'

# Replays them to the answer and notes its outputs: "0" settled at the end of a time step; "1"
# at once after the first change, before the nonblocking assignments; "2" the exam is over.
# The first change of a time step is blocking, as of a clock; what follows comes one moment later.
EXAM = """module ExamOfTopModule;{unit}
  {regs}
  {wires}
  TopModule top_module1({connections});
  wire [{many}:0] given = {{{outs}}};
  integer questions = $fopen("questions.txt", "r"), answers = $fopen("answers.txt", "w");
  integer found;
  reg [63:0] now, next, noted = 0;
  reg [{wide}:0] vector;
  reg [{many}:0] settled;
  reg tick = 0, fresh, no_input;
  initial begin
    $fstrobe(answers, "%0d 0 %b", $time, given);
    found = $fscanf(questions, "%d %b", next, vector);
    while (found == 2) begin
      now = next;
      if (now > $time) #(now - $time);
      settled = given;
      {{{set}}} = vector;
      fresh = 1;
      found = $fscanf(questions, "%d %b", next, vector);
      while (fresh || found == 2 && next == now) begin
        if (found == 2 && next == now) begin
          {{{set}}} <= vector;
          tick <= !tick;
        end
        if (fresh) begin
          #0 if (given !== settled) $fdisplay(answers, "%0d 1 %b", now, given);
        end
        fresh = 0;
        if (found == 2 && next == now) begin
          @(tick) found = $fscanf(questions, "%d %b", next, vector);
        end
      end
    end
    $fdisplay(answers, "%0d 2 0", $time);
    $finish;
  end
  always @(given) if (noted != $time) begin
    noted = $time;
    $fstrobe(answers, "%0d 0 %b", $time, given);
  end
endmodule
"""

# Compiled behind the answer: what an open comment, condition or macro of it swallows is missed.
END = "module EndOfExam; logic end_of_exam; endmodule\n"

# Stands in the answer's place and replays its outputs.
MARKING = """module TopModule({ports});{unit}
  integer answers, found, sort;
  reg [63:0] now;
  reg [{many}:0] vector;
  initial begin
    answers = $fopen("answers.txt", "r");
    found = $fscanf(answers, "%d %d %b", now, sort, vector);
    while (found == 3 && sort != 2) begin
      if (sort == 1) begin
        while ($time < now) {at_ins};
        {{{outs}}} = vector;
      end else begin
        if (now > $time) #(now - $time);
        {{{outs}}} <= vector;
      end
      found = $fscanf(answers, "%d %d %b", now, sort, vector);
    end
  end
endmodule
"""


@dataclass(frozen=True)
class _Exam:
    """What all answers to one problem share; `broken` says why there is no exam."""

    broken: tuple | None = None
    questions: str = ""
    bench: str = ""
    marking: str = ""
    calls: dict | None = None


def _connected(testbench):
    """How the testbench connects TopModule: [(port, ...)] names, None for `.*` or by position."""
    found = re.search(r"\bTopModule\b\s*(?:#\s*\([^;]*?\)\s*)?\w+\s*\(([^;]*)\)\s*;",
                      _COMMENT.sub(" ", testbench))
    text = found[1] if found else ""
    return None if "." not in text or re.search(r"\.\s*\*", text) else \
        re.findall(r"\.\s*(\w+)", re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", text))


def _write_programs(problem, ports):
    """Sources of the three programs for [(direction, width, name)]."""
    units = [(_UNITS.index(unit), -int(number), f"{number}{unit}")
             for number, unit in _SCALE.findall(problem.testbench + problem.reference)]
    unit = " timeunit {0}; timeprecision {0};".format(max(units)[2]) if units else ""
    ins, outs = ([port for port in ports if (port[0] == "INPUT") == wanted]
                 for wanted in (True, False))
    def bits(width):
        return f"[{width - 1}:0] "

    def names(chosen, empty="1'b0"):
        return ", ".join(name for _, _, name in chosen) or empty
    by_name = _connected(problem.testbench) is not None
    note = NOTE.format(ins=names(ins))
    words = {
        "note": note, "unit": unit, "ins": names(ins), "outs": names(outs),
        "set": names(ins, "no_input"),
        "wide": max(0, sum(width for _, width, _ in ins) - 1),
        "many": max(0, sum(width for _, width, _ in outs) - 1),
        "ports": ", ".join(f"{'input' if way == 'INPUT' else 'output reg'} {bits(width)}{name}"
                           for way, width, name in ports),
        "regs": " ".join(f"reg {bits(width)}{name};" for _, width, name in ins),
        "wires": " ".join(f"wire {bits(width)}{name};" for _, width, name in outs),
        "connections": ", ".join(f".{name}({name})" if by_name else name for _, _, name in ports),
        "at_ins": f"@({' or '.join(name for _, _, name in ins)})" if ins else "#1",
        "at_edges": " ".join(f"always @({edge} {name}) {note}" for _, width, name in ins if width == 1
                             for edge in ("posedge", "negedge")),
        "ever": "forever" if ins else "if (0)"}
    trusted = _COMMENT.sub(" ", problem.testbench + problem.reference)
    modules = sorted({*re.findall(r"\bmodule\s+(\w+)", trusted)} - {"TopModule"})
    stand_ins = "".join(f"module {name}; endmodule\n" for name in modules)
    questions = QUESTIONS.format(**words).replace("output reg", "output")
    return questions, EXAM.format(**words) + stand_ins, MARKING.format(**words)


@functools.lru_cache(maxsize=4096)
def _ports_of(problem):
    """Ports of the reference: ((direction, width, name), ...); () where it does not compile."""
    with _folder() as folder:
        (folder / "ref.sv").write_text(problem.reference, encoding="utf-8")
        run_limited(["iverilog", "-g2012", "-s", "RefModule", "-o", "ref", "ref.sv"], folder,
                    Limits())
        listing = _read(folder / "ref")
    head = re.search(r'^S_\w+ \.scope module, "RefModule".*?(?=^S_|\Z)', listing, re.MULTILINE | re.DOTALL)
    return tuple((way, int(width), name) for way, width, name in _PORT.findall(head[0] if head
                                                                                else ""))


@functools.lru_cache(maxsize=4096)
def _prepare(problem):
    """Run the questions, and compile what all answers share: an `_Exam`."""
    named, by_reference = _connected(problem.testbench), _ports_of(problem)
    known = {name: (way, width, name) for way, width, name in by_reference}
    ports = by_reference if named is None else \
        [known.get(name, ("OUTPUT", 1, name)) for name in named]
    if not ports:
        return _Exam(("compile", "the reference does not compile, or no TopModule is tested"))
    questions, bench, marking = _write_programs(problem, ports)
    with _folder() as folder:
        for name, text in (("test.sv", problem.testbench), ("ref.sv", problem.reference),
                           ("questions.sv", questions), ("marking.sv", marking),
                           ("bench.sv", bench), ("end.sv", END),
                           ("top.sv", problem.reference.replace("RefModule", "TopModule"))):
            (folder / name).write_text(text, encoding="utf-8")
        for name in ("questions", "marking"):
            said, status, ended = run_limited(
                ["iverilog", "-g2012", "-s", "tb", "-o", name, f"{name}.sv", "test.sv", "ref.sv"],
                folder, Limits())
            if status or ended:
                return _Exam(("compile", f"the problem's own files do not compile: {said[:200]}"))
        run_limited(["vvp", "-n", "questions", "-none"], folder, Limits())
        said, status, _ = _compile(folder, Limits(), ["bench.sv", "top.sv", "end.sv"])
        calls = collections.Counter(_CALL.findall(_read(folder / "exam")))
        lines = _read(folder / "questions.txt").splitlines()
        asked = [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]
        return _Exam(None, "\n".join([*asked, lines[-1], ""]), bench, _read(folder / "marking"), calls)


# ---- What an answer may call ----

# Nothing here opens a file or starts a program; the bench's own calls are counted apart.
_CALL = re.compile(r'^(?:L_\S+ +|\s+)?(?:%vpi_call|%vpi_func|\S+ \.sfunc|\.sfunc)\S* +\d+ +\d+ +"([^"]*)"',
                   re.MULTILINE)
_HARMLESS = frozenset("$" + name for text in ("display", "write", "strobe", "monitor", "swrite")
                      for name in (text, text + "b", text + "h", text + "o")) | frozenset(
    ["$error", "$warning", "$info", "$fatal", "$finish", "$stop", "$sformat", "$sformatf", "$sscanf", "$time", "$stime", "$realtime", "$timeformat", "$printtimescale", "$monitoron", "$monitoroff", "$random", "$urandom", "$urandom_range", "$dist_uniform", "$dist_normal", "$test$plusargs", "$value$plusargs", "$dumpfile", "$dumpvars", "$dumpon", "$dumpoff", "$dumpall", "$dumpflush", "$dumplimit", "$signed", "$unsigned", "$bits", "$clog2", "$countones", "$countbits", "$onehot", "$onehot0", "$isunknown", "$size", "$left", "$right", "$low", "$high", "$increment", "$dimensions", "$unpacked_dimensions", "$rtoi", "$itor", "$realtobits", "$bitstoreal", "$shortrealtobits", "$bitstoshortreal", "$ln", "$log10", "$exp", "$sqrt", "$pow", "$floor", "$ceil", "$sin", "$cos", "$tan", "$asin", "$acos", "$atan", "$atan2", "$hypot", "$sinh", "$cosh", "$tanh", "$asinh", "$acosh", "$atanh", "$abs", "$min", "$max", "$cast", "$fflush"])
_METHOD = re.compile(r"\$ivl_\w*method\$\w+$")  # what Icarus makes of x.size() and enum.next()


def forbidden_call(program, known):
    """A system call of a compiled program that is neither harmless nor one of the bench's; or None.

    Args:
      program: Icarus's vvp text.
      known: `Counter` of the bench's calls. Whatever trick was used to spell one, here it is plain.
    """
    more = collections.Counter(_CALL.findall(program)) - collections.Counter(known)
    return next((name for name in sorted(more)
                 if name not in _HARMLESS and not _METHOD.match(name)), None)


def foreign_file(listed, sources):
    """A file that the compiler read (its own list, after all macros) beside the sources; or None."""
    return next((name for name in listed.split("\n") if name and name not in sources), None)


def cut_short(status, answers):
    """(category, detail) where an exam did not come to its end, by the simulator's status; or None."""
    if status not in (0, 1):
        return "runtime", f"vvp ended with {status}"
    over = re.search(r"^\d+ 2 0$", answers[-10_000:], re.MULTILINE)
    return None if over and not status else ("refused", "ends the simulation itself")


# ---- Judging ----

@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _read(path):
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def judge(problem, code, limits=Limits(), waves=None):
    """Judge one answer; never raises for what the answer does, only for the machine's state.

    Args:
      problem: a `Problem`.
      code: Verilog text, or None where the model wrote none.
      limits: `Limits` of each compilation and simulation.
      waves: where to put the waveform file (VCD), if one is wanted.

    Returns:
      A `Verdict`.

    Raises:
      ValueError: Icarus is missing or was killed, or TMPDIR is full: nothing that an answer could
        be blamed for.
    """
    icarus_version()
    start = time.perf_counter()
    if code is None or not code.strip():
        return Verdict("no code", "the answer holds no module")
    if len(code) > limits.code:
        return Verdict("refused", f"the answer is longer than {limits.code} characters")
    if problem.missing:
        missing = ", ".join(problem.missing)
        return Verdict("compile", f"the problem's own files are missing: {missing}")
    exam = _prepare(problem)
    if exam.broken:
        return Verdict(*exam.broken)
    with _folder() as folder:
        _room(folder, limits)
        category, detail, count, log, printed = _judge_in(folder, exam, code, limits, waves)
        if category != "pass":
            _room(folder, limits)
    return Verdict(category, detail, *(count or (None, None)), log, printed,
                   time.perf_counter() - start)


def _room(folder, limits):
    """A compiler that finds no room writes half a file, and blames the answer for it."""
    if shutil.disk_usage(folder).free < limits.file:
        raise ValueError(f"judging needs {limits.file >> 20} MiB for temporary files, and "
                         f"{Path(folder).parent} has less. Free some, or set TMPDIR elsewhere; then "
                         "run this again.")


def _compile(folder, limits, sources):
    """Compile the exam with verilog-eval's options: (what was printed, exit status, limit)."""
    return run_limited(["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012", "-s",
                        "ExamOfTopModule", "-s", "EndOfExam", "-Mall=files", "-o", "exam", *sources], folder, limits)


def _judge_in(folder, exam, code, limits, waves):
    """(category, detail, count or None, log, printed) of one answer."""
    for name, text in (("bench.sv", exam.bench), ("top.sv", code), ("marking", exam.marking),
                       ("questions.txt", exam.questions), ("end.sv", END)):
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
    sources = ["bench.sv", "top.sv", "end.sv"]  # the bench comes first: no macro of the answer reaches it
    log, status, ended = _compile(folder, limits, sources)
    if ended:
        return *_ended(ended, "compiling", limits), None, log, ""
    if status or not (folder / "exam").exists():
        category, detail, _ = analyse(log)
        if category not in ("compile", "syntax"):
            category, detail = "compile", f"iverilog ended with {status}: {detail}"
        return category, detail, None, log, ""
    if other := foreign_file(_read(folder / "files"), sources):
        return "refused", f"reads another file: {other}", None, log, ""
    if call := forbidden_call(_read(folder / "exam"), exam.calls):
        return "refused", f"calls {call}", None, log, ""
    printed, status, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, limits, alone=True)
    if ended:
        return *_ended(ended, "simulating", limits), None, log, printed
    if why := cut_short(status, _read(folder / "answers.txt")):
        return *why, None, log, printed
    marked, status, ended = run_limited(
        ["vvp", "-n", "marking", *([] if waves else ["-none"])], folder, limits)
    if waves and (folder / "wave.vcd").exists():
        write_text(waves, _read(folder / "wave.vcd"))
    log += marked
    if ended:
        return *_ended(ended, "simulating", limits), None, log, printed
    category, detail, count = analyse(log)
    if category == "pass" and (count[1] == 0 or status):
        return "runtime", f"no sample compared, or vvp ended with {status}", count, log, printed
    return category, detail, count, log, printed


def _ended(limit, phase, limits):
    if limit == "time":
        return "timeout", f"{phase} took over {limits.seconds:g} s"
    return "runtime", f"{phase} printed over {limits.output} bytes"


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
    network_guard(), tether()
    different = list(dict.fromkeys(candidates))
    progress, verdicts = Progress(len(different), text), {}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        pending = {pool.submit(judge, *candidate, limits): candidate for candidate in different}
        for done in as_completed(pending):
            verdicts[pending[done]] = done.result()
            progress.update(note=f"{sum(v.passed for v in verdicts.values())} pass")
    return [verdicts[candidate] for candidate in candidates]
