"""Judge a Verilog module that a language model wrote, by verilog-eval's rules, without trusting it.

A problem is three files, `*_prompt.txt`, `*_ref.sv` (RefModule) and `*_test.sv` (tb). verilog-eval
compiles them together with the answer, so an answer can read the reference, stop the simulation or
print the winning line. Here the answer never meets them:

1. *The exam*: the testbench asks its questions, the answer answers, and its outputs are written
   down. There is nothing to copy: no reference is in this program, and what the testbench has is
   out of reach (`verilog.programs`).
2. *The marking*: testbench and reference run, and in the answer's place stands a module that
   replays the outputs. Only this run decides, and no text of the answer is in it.
"""

import collections
import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tables.errors import UserError
from verilog import programs
from verilog.problems import Problem
from verilog.sandbox import Limits, icarus_version, run_limited

LONGEST = 1 << 20  # characters of an answer


@dataclass(frozen=True)
class Verdict:
    """What became of one answer."""

    category: str     # pass, mismatch, timeout, runtime, compile, syntax, refused, no code, or
                      # "broken problem": its own files don't compile, and no answer is guilty of it
    detail: str = ""  # one line: why; equal answers have equal details
    letter: str = ""  # verilog-eval's own, finer category; "" where it has none
    mismatches: int | None = None  # samples unlike the reference's; None: the bench did not get there
    samples: int | None = None     # samples compared
    log: str = ""                  # the compiler's output and the testbench's

    @property
    def passed(self):
        """True for the category pass and nothing else."""
        return self.category == "pass"


# ---- verilog-eval's rules ----

# The first line with one of the first dictionary decides, then of the second; a count comes last.
_DECIDES = ({
    "syntax error": "S",
    "error: This assignment requires an explicit cast": "e",
    "error: Sized numeric constant must have a size greater than zero": "0",
    "warning: always_comb process has no sensitivities": "n",
    "found no sensitivities so it will never trigger": "n",
    "is declared here as wire": "w",
    "Unknown module type": "m",
    "Unable to bind wire/reg/memory `clk'": "c",
    "TIMEOUT": "T",
}, {"Unable to bind wire/reg": "p"}, {"error": "C"})
_MISMATCHES = re.compile(r"^Mismatches: (\d+) in (\d+) samples$", re.MULTILINE)


def analyse(log):
    """The official analyser's rules for a log: (letter, why, (mismatches, samples) or None).

    The letter is `.` for a pass, S e 0 n w m c p C for what did not compile, T for a timeout and R
    for any other failure at run time. The count is the log's last; as in verilog-eval, a log passes
    in which any count says 0. (Theirs also reads what the answer prints, so a plain $display wins.)
    """
    log = log.replace("\r", "\n")
    counts = [(int(wrong), int(of)) for wrong, of in _MISMATCHES.findall(log)]
    count = counts[-1] if counts else None
    for letters in _DECIDES:
        for line in log.split("\n"):
            if found := next((letter for text, letter in letters.items() if text in line), None):
                return found, line.strip(), count
    if any(wrong == 0 for wrong, _ in counts):
        return ".", "", count
    if count:
        return "R", f"{count[0]} of {count[1]} samples differ", count
    return "R", "the testbench never reported", None


def _verdict(letter, why, code, log, count=None):
    """A `Verdict` by verilog-eval's letter, which also knows `r`: R, and an asynchronous reset."""
    category = {".": "pass", "S": "syntax", "T": "timeout",
                "R": "mismatch" if count else "runtime"}.get(letter, "compile")
    if letter == "R" and any(text in code for text in
                             ("posedge reset", "negedge reset", "posedge r)")):
        letter = "r"
    return Verdict(category, why, letter, *(count or (None, None)), log)


# ---- What all answers to one problem share ----

@dataclass(frozen=True)
class _Exam:
    """What all answers to one problem share."""

    bench: str             # all of the exam's program but the answer, with `SECRET` in its names
    marking: str           # the compiled program that marks
    calls: collections.Counter  # the bench's own system calls
    end: int               # the time at which the testbench ends


_PREPARING: dict[Problem, threading.Lock] = {}
_PREPARING_GUARD = threading.Lock()


def _prepare(problem: Problem) -> _Exam | Verdict:
    """The `_Exam` of a problem, made once, however many threads ask for it.

    verilog-eval has problems that Icarus can't compile. There it's the verdict on all answers.

    Raises:
      UserError: the compiler fails otherwise, or the testbench doesn't end, or reports nothing.
    """
    with _PREPARING_GUARD:
        lock = _PREPARING.setdefault(problem, threading.Lock())
    with lock:
        return _prepare_once(problem)


@functools.lru_cache(maxsize=4096)
def _prepare_once(problem: Problem) -> _Exam | Verdict:
    """Compile the marking, and run both programs with an empty answer."""
    try:
        return _made(problem)
    except _DoesNotCompile as error:
        why = "the problem's own files don't compile: " + str(error).partition("\n")[0][:150]
        return Verdict("broken problem", why, "C", log=str(error))


class _DoesNotCompile(Exception):
    """Icarus's words about a line of a problem's own files."""


def _made(problem: Problem) -> _Exam:
    limits = Limits()
    with _folder() as folder:
        _room(folder, limits)
        _write(folder, {"test.sv": problem.testbench, "ref.sv": problem.reference})
        _own_files(problem, folder, "-s", "RefModule", "-o", "ref", "ref.sv")
        ports = programs.tested_ports(problem.testbench, programs.reference_ports(_read(folder / "ref")))
        _write(folder, {"marking.sv": programs.marking(problem, ports)})
        _own_files(problem, folder, "-s", "tb", "-o", "marking", "marking.sv", "test.sv", "ref.sv")
        _own_files(problem, folder, "-E", "-o", "plain.sv", "test.sv")
        marking = _read(folder / "marking")
        bench = programs.exam(problem, _read(folder / "plain.sv"), ports,
                              programs.scope_names(marking))
        log, status, ended = _compile(folder, bench, programs.empty_answer(ports), limits)
        if status or ended:
            raise _broken(problem, f"its testbench doesn't compile without the reference: {log}")
        calls = system_calls(_read(folder / "exam"))
        _, status, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, limits)
        recording = _LAST_LINE.search(_read(folder / "answers.txt"))
        printed, _, _ = run_limited(["vvp", "-n", "marking", "-none"], folder, limits)
    if ended or not recording:
        raise _broken(problem, "its testbench doesn't come to an end")
    if analyse(printed)[2] is None:
        raise _broken(problem, 'its testbench prints no line "Mismatches: 0 in 9 samples"')
    return _Exam(bench, marking, calls, int(recording[1]))


def _own_files(problem: Problem, folder: Path, *words: str) -> None:
    """Run the compiler on the problem's own files.

    Raises:
      _DoesNotCompile: it names a line of theirs, or a module that isn't there.
      UserError: it fails for another reason.
    """
    log, status, ended = run_limited(["iverilog", "-g2012", *words], folder, Limits())
    if not status and not ended:
        return
    if re.search(r"^(?:test|ref)\.sv:\d+: |Unable to find the root module", log, re.MULTILINE):
        raise _DoesNotCompile(log)
    raise _broken(problem, f"Icarus can't compile its own files: {log}")


def _broken(problem: Problem, why: str) -> UserError:
    """An error about a problem's own files, of which no answer is guilty."""
    first_line = why.strip().partition("\n")[0]
    return UserError(f"The problem {problem.name} can't be judged: {first_line[:300]}. Mend its "
                     "*_ref.sv or *_test.sv, or take it out of the folder.")


# ---- What an answer may call ----

# Nothing in harmless.txt opens a file or starts a program; the bench's own calls are counted apart.
# Wherever a call stands in the compiled text, and even inside a string, it counts.
_CALL = re.compile(r'(?:%vpi_call|%vpi_func|\.sfunc)[^"]*"([^"]*)"')
_HARMLESS = frozenset((Path(__file__).parent / "harmless.txt").read_text().split())
_METHOD = re.compile(r"\$ivl_\w*method\$\w+$")  # what Icarus makes of x.size() and enum.next()

# These are harmless with a fixed first argument alone: the terminal, or a file that isn't there.
_CALL_LINE = r"^ *%vpi_call(?:/\w)? \d+ \d+ "
_TERMINAL = r"(?:32'sb0{31}1|32'b0{31}1|32'(?:sb|b)10{29}(?:01|10))"
_TO_TERMINAL = re.compile(
    _CALL_LINE + rf'"(\$(?:fdisplay|fwrite|fstrobe|fmonitor)[bho]?|\$fflush)", {_TERMINAL}[ ,]',
    re.MULTILINE)
_FLUSH_ALL = re.compile(_CALL_LINE + r'"(\$fflush)" \{', re.MULTILINE)
_MEMORY_FILE = re.compile(_CALL_LINE + r'"(\$readmem[bh])", "(\w[\w.-]*)",', re.MULTILINE)
_OUR_FILES = frozenset(("bench.sv", "top.sv", "end.sv", "exam", "files", "answers.txt", "marking"))


def system_calls(program: str) -> collections.Counter:
    """How often a compiled program makes each system call that isn't harmless by its argument."""
    calls = collections.Counter(_CALL.findall(program))
    calls.subtract(_TO_TERMINAL.findall(program) + _FLUSH_ALL.findall(program))
    for name, file in _MEMORY_FILE.findall(program):
        if file not in _OUR_FILES:  # the exam's folder has no other: Icarus warns, and goes on
            calls[name] -= 1
    return calls


def forbidden_call(program: str, known: collections.Counter | dict) -> str | None:
    """A system call of a compiled program that is neither harmless nor one of the bench's; or None.

    Args:
      program: Icarus's vvp text.
      known: the bench's `system_calls`. Whatever trick was used to spell one, here it is plain.
    """
    unknown = system_calls(program) - collections.Counter(known)
    for name in sorted(unknown):
        if name not in _HARMLESS and not _METHOD.match(name):
            return name
    return None


def unbalanced_line(program: str) -> str | None:
    """A line of a compiled program whose quotes don't balance; or None.

    Icarus 11 writes some names as they are, so a quote in one could end the text that it stands in.
    """
    for line in program.split("\n"):
        if line.count('"') % 2 and re.sub(r"\\.", "", line).count('"') % 2:
            return line
    return None


def foreign_file(listed):
    """A file that the compiler read (its own list, after all macros) beside `SOURCES`; or None."""
    return next((name for name in listed.split("\n") if name and name not in SOURCES), None)


_LAST_LINE = re.compile(r"^(\d+) 2 0 0$\n?\Z", re.MULTILINE)


def cut_short(status: int, answers: str, end: int) -> bool:
    """Whether an exam ended before its testbench did, by the simulator's status and the recording."""
    last = _LAST_LINE.search(answers[-1000:])
    return bool(status) or not last or int(last[1]) < end


# ---- Judging ----

@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _write(folder, texts):
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


def _read(path):
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def judge(problem, code, limits=Limits(), waves=None):
    """The `Verdict` on one answer; never raises for what it does, only for the machine's state.

    Args:
      code: Verilog text, or None where the model wrote none.
      limits: of each compilation and simulation.
      waves: where to put the waveform file (VCD), if one is wanted.

    Raises:
      UserError: Icarus is missing or was killed, or TMPDIR is full: nothing that an answer could
        be blamed for.
    """
    icarus_version()
    if code is None or not code.strip():
        return Verdict("no code", "the answer holds no module")
    if len(code) > LONGEST:
        return Verdict("refused", f"the answer is longer than {LONGEST} characters")
    exam = _prepare(problem)
    if isinstance(exam, Verdict):
        return exam
    with _folder() as folder:
        _room(folder, limits)
        verdict = _judge_in(folder, exam, code, limits, waves)
        if not verdict.passed:
            _room(folder, limits)
    return verdict


def _room(folder, limits):
    """A compiler that finds no room writes half a file, and blames the answer for it."""
    if shutil.disk_usage(folder).free < limits.file:
        raise UserError(f"judging needs {limits.file >> 20} MiB for temporary files, and "
                         f"{Path(folder).parent} has less. Free some, or set TMPDIR elsewhere; then "
                         "run this again.")


# The bench comes first: no macro of the answer reaches it.
SOURCES = ["bench.sv", "top.sv", "end.sv"]
COMPILER = ["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012"]  # verilog-eval's options


def drawn_letters() -> str:
    """What stands behind each name of the testbench in one exam: 64 bits that nobody can guess."""
    return "_" + secrets.token_hex(8)


def _compile(folder: Path, bench: str, code: str, limits: Limits) -> tuple[str, int, str | None]:
    """Compile the exam, with names drawn anew: (what was printed, exit status, limit)."""
    letters = drawn_letters()
    end = f"module End{letters}; logic end_of_exam; endmodule\n"
    _write(folder, {"bench.sv": bench.replace(programs.SECRET, letters), "top.sv": code, "end.sv": end})
    log, status, ended = run_limited(
        [*COMPILER, "-s", f"tb{letters}", "-s", f"End{letters}", "-Mall=files", "-o", "exam", *SOURCES],
        folder, limits)
    return log.replace(letters, ""), status, ended


def _judge_in(folder, exam, code, limits, waves):
    """The `Verdict` of one answer, in a folder of its own."""
    log, status, ended = _compile(folder, exam.bench, code, limits)
    if ended:
        return _ended(ended, "compiling", limits, log)
    # The compiler's words are half the answer's own: they may condemn it, and never acquit it.
    letter, why, _ = analyse(log)
    if status or not (folder / "exam").exists():
        if letter in ".RT":
            letter, why = "C", f"iverilog ended with {status}: {why}"
        return _verdict(letter, why, code, log)
    if other := foreign_file(_read(folder / "files")):
        return Verdict("refused", f"reads another file: {other}", log=log)
    program = _read(folder / "exam")
    if call := forbidden_call(program, exam.calls):
        return Verdict("refused", f"calls {call}", log=log)
    if unbalanced_line(program):
        return Verdict("refused", "has a name with a quote in it", log=log)
    _, status, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, limits)
    if ended:
        return _ended(ended, "simulating", limits, log)
    if status not in (0, 1):
        return _verdict("R", f"vvp ended with {status}", code, log)
    if cut_short(status, _read(folder / "answers.txt"), exam.end):
        return Verdict("refused", "ends the simulation itself", log=log)
    _write(folder, {"marking": exam.marking})
    marked, status, ended = run_limited(
        ["vvp", "-n", "marking", *([] if waves else ["-none"])], folder, limits)
    if waves and (folder / "wave.vcd").exists():
        Path(waves).write_text(_read(folder / "wave.vcd"), encoding="utf-8")
    if ended:
        return _ended(ended, "simulating", limits, log + marked)
    result, reason, count = analyse(marked)
    if letter not in ".R":
        result, reason = letter, why
    elif result == "." and (count[1] == 0 or status):
        result, reason, count = "R", f"no sample compared, or vvp ended with {status}", None
    return _verdict(result, reason, code, log + marked, count)


def _ended(limit, phase, limits, log):
    if limit == "time":
        return Verdict("timeout", f"{phase} took over {limits.seconds:g} s", "T", log=log)
    return Verdict("runtime", f"{phase} printed over {limits.output} bytes", "R", log=log)


def judge_many(candidates, limits=Limits()):
    """Judge many (problem, code or None) pairs in parallel, identical ones once; verdicts in order."""
    different = list(dict.fromkeys(candidates))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = dict(zip(different, pool.map(lambda pair: judge(*pair, limits), different), strict=True))
    return [verdicts[candidate] for candidate in candidates]
