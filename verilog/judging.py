"""Judge a Verilog module that a language model wrote, by verilog-eval's rules, without trusting it.

A problem is three files, `*_prompt.txt`, `*_ref.sv` (RefModule) and `*_test.sv` (tb). verilog-eval
compiles them together with the answer, so an answer can read the reference, stop the simulation or
print the winning line. Here the answer never meets the reference:

1. *The exam*: the testbench asks its questions, the answer answers, and its outputs are written
   down. There is nothing to copy: no reference is in this program, and what the testbench has is
   out of reach (`verilog.programs`).
2. *The marking*: testbench and reference run, and in the answer's place stands a module that
   replays the outputs. Only this run decides, and no text of the answer is in it.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tables.errors import UserError
from verilog import programs
from verilog.problems import Pair, Problem
from verilog.sandbox import Limits, Ran, icarus_version, run_limited

LONGEST = 1 << 20  # characters of an answer
DEFAULT = Limits()


@dataclass(frozen=True)
class Verdict:
    """What became of one answer."""

    category: str     # pass, mismatch, timeout, runtime, compile, syntax, refused, no code, or
                      # "broken problem": its own files don't compile, and no answer is guilty of it
    detail: str = ""  # one line: why; equal answers have equal details
    letter: str = ""  # verilog-eval's own, finer category; "" where it has none
    mismatches: int | None = None  # samples unlike the reference's; None: nothing was counted
    samples: int | None = None     # samples compared
    log: str = ""                  # the compiler's output and the testbench's

    @property
    def passed(self) -> bool:
        """True for the category pass and nothing else."""
        return self.category == "pass"


# ---- verilog-eval's rules ----

# The first line that holds one of the first texts decides; without one, the second texts, and so
# on. The counts come last.
_DECIDES = (
    {
        "syntax error": "S",
        "error: This assignment requires an explicit cast": "e",
        "error: Sized numeric constant must have a size greater than zero": "0",
        "warning: always_comb process has no sensitivities": "n",
        "found no sensitivities so it will never trigger": "n",
        "is declared here as wire": "w",
        "Unknown module type": "m",
        "Unable to bind wire/reg/memory `clk'": "c",
        "TIMEOUT": "T",
    },
    {"Unable to bind wire/reg": "p"},
    {"error": "C"},
)
_MISMATCHES = re.compile(r"^Mismatches: (\d+) in (\d+) samples$", re.MULTILINE)
_CATEGORIES = {".": "pass", "S": "syntax", "T": "timeout"}
_ASYNCHRONOUS = ("posedge reset", "negedge reset", "posedge r)")


class Count(NamedTuple):
    """What a testbench counted: how many samples differ from the reference's, and of how many."""

    mismatches: int
    samples: int


class Analysis(NamedTuple):
    """What verilog-eval's rules read in a log."""

    letter: str
    why: str  # the line that decided; "" for a pass
    counted: Count | None  # the log's last; None: the testbench counted nothing


def analyze(log: str) -> Analysis:
    """The official analyzer's rules for a log.

    The letter is `.` for a pass, S e 0 n w m c p C for what didn't compile, T for a timeout and R
    for any other failure at run time. As in verilog-eval, a log passes if any of its counts says 0.
    (Theirs also reads what the answer prints, so a plain $display wins.)
    """
    log = log.replace("\r", "\n")
    counts = []
    for mismatches, samples in _MISMATCHES.findall(log):
        count = Count(int(mismatches), int(samples))
        counts.append(count)
    last = counts[-1] if counts else None

    for letters in _DECIDES:
        for line in log.split("\n"):
            letter = _letter_of(line, letters)
            if letter is not None:
                return Analysis(letter, line.strip(), last)
    for count in counts:
        if count.mismatches == 0:
            return Analysis(".", "", last)
    if last is None:
        return Analysis("R", "the testbench never reported", None)
    why = f"{last.mismatches} of {last.samples} samples differ"
    return Analysis("R", why, last)


def _letter_of(line: str, letters: dict[str, str]) -> str | None:
    """The letter of the first text that stands in the line; None where none does."""
    for text, letter in letters.items():
        if text in line:
            return letter
    return None


def _verdict(letter: str, why: str, code: str, log: str, count: Count | None = None) -> Verdict:
    """A `Verdict` by verilog-eval's letter.

    verilog-eval also knows the letter `r`: R, and the answer's code has an asynchronous reset.
    """
    if letter != "R":
        category = _CATEGORIES.get(letter, "compile")
    elif count is None:
        category = "runtime"
    else:
        category = "mismatch"
    if letter == "R":
        for text in _ASYNCHRONOUS:
            if text in code:
                letter = "r"
    if count is None:
        return Verdict(category, why, letter, log=log)
    return Verdict(
        category=category,
        detail=why,
        letter=letter,
        mismatches=count.mismatches,
        samples=count.samples,
        log=log)


# ---- What all answers to one problem share ----

@dataclass(frozen=True)
class _Exam:
    """What all answers to one problem share."""

    bench: str      # all of the exam's program but the answer, with `SECRET` in its names
    marking: str    # the compiled program that marks
    calls: Counter  # the bench's own system calls
    end: int        # the time at which the testbench ends


class _DoesNotCompile(Exception):
    """Icarus's words about a line of a problem's own files."""


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
    """What `_prepare` gives, for one thread at a time."""
    try:
        return _made(problem)
    except _DoesNotCompile as error:
        log = str(error)
    first_line = log.partition("\n")[0]
    return Verdict(
        category="broken problem",
        detail=f"the problem's own files don't compile: {first_line[:150]}",
        letter="C",
        log=log)


def _made(problem: Problem) -> _Exam:
    """Compile the marking, and run both programs with an empty answer."""
    with _folder() as folder:
        _check_room(folder, DEFAULT)
        texts = {"test.sv": problem.testbench, "ref.sv": problem.reference}
        _write(folder, texts)

        _compile_own(problem, folder, "-s", "RefModule", "-o", "ref", "ref.sv")
        compiled = _read(folder / "ref")
        reference = programs.reference_ports(compiled)
        events = programs.reference_events(compiled, reference)
        ports = programs.tested_ports(problem.testbench, reference)

        texts = {"marking.sv": programs.marking(problem, ports)}
        _write(folder, texts)
        sources = ("marking.sv", "test.sv", "ref.sv")
        _compile_own(problem, folder, "-s", "tb", "-o", "marking", *sources)
        marking = _read(folder / "marking")

        _compile_own(problem, folder, "-E", "-o", "plain.sv", "test.sv")
        testbench = _read(folder / "plain.sv")
        scopes = programs.scope_names(marking)
        bench = programs.exam(problem, testbench, ports, scopes, events)

        empty = programs.empty_answer(ports)
        end = _rehearse(problem, folder, bench, empty)
        rehearsed = _read(folder / "exam")
        return _Exam(
            bench=bench,
            marking=marking,
            calls=system_calls(rehearsed),
            end=end)


def _rehearse(problem: Problem, folder: Path, bench: str, empty: str) -> int:
    """Let an empty answer take the exam, mark it, and return the time at which the exam ended."""
    log, status, ended = _compile(folder, bench, empty, DEFAULT)
    if status or ended:
        raise _broken(problem, f"its testbench doesn't compile without the reference: {log}")

    exam = run_limited(_RUN_EXAM, folder, DEFAULT)
    answers = _read(folder / "answers.txt")
    last = _LAST_LINE.search(answers)
    if exam.ended or last is None:
        raise _broken(problem, "its testbench doesn't come to an end")

    marking = run_limited(_RUN_MARKING, folder, DEFAULT)
    analysis = analyze(marking.output)
    if analysis.counted is None:
        raise _broken(problem, 'its testbench prints no line "Mismatches: 0 in 9 samples"')
    return int(last[1])


_BLAMES_PROBLEM = re.compile(
    r"^(?:test|ref)\.sv:\d+: |Unable to find the root module", re.MULTILINE)


def _compile_own(problem: Problem, folder: Path, *words: str) -> None:
    """Run the compiler on the problem's own files.

    Raises:
      _DoesNotCompile: it names a line of theirs, or a module that isn't there.
      UserError: it fails for another reason.
    """
    command = ["iverilog", "-g2012", *words]
    log, status, ended = run_limited(command, folder, DEFAULT)
    if status == 0 and ended is None:
        return
    if _BLAMES_PROBLEM.search(log):
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
# The bench comes first: no macro of the answer reaches it.
SOURCES = ["bench.sv", "top.sv", "end.sv"]
_OUR_FILES = frozenset([*SOURCES, "exam", "files", "answers.txt", "marking"])


def system_calls(program: str) -> Counter:
    """How often a compiled program makes each system call that isn't harmless by its argument."""
    calls = Counter(_CALL.findall(program))
    calls.subtract(_TO_TERMINAL.findall(program))
    calls.subtract(_FLUSH_ALL.findall(program))
    for name, file in _MEMORY_FILE.findall(program):
        if file not in _OUR_FILES:  # the exam's folder has no other: Icarus warns, and goes on
            calls[name] -= 1
    return calls


def forbidden_call(program: str, known: Mapping[str, int]) -> str | None:
    """A system call of a compiled program that is neither harmless nor one of the bench's; or None.

    Args:
      program: Icarus's vvp text.
      known: the bench's `system_calls`. Whatever trick was used to spell one, here it is plain.
    """
    unknown = system_calls(program) - Counter(known)
    for name in sorted(unknown):
        if name not in _HARMLESS and not _METHOD.match(name):
            return name
    return None


def unbalanced_line(program: str) -> str | None:
    """A line of a compiled program whose quotes don't balance; or None.

    Icarus 11 writes some names as they are, so a quote in one could end the text that it stands in.
    """
    for line in program.split("\n"):
        is_even = line.count('"') % 2 == 0
        if is_even and "\\" not in line:
            continue
        unescaped = re.sub(r"\\.", "", line)
        if unescaped.count('"') % 2:
            return line
    return None


def foreign_file(listed: str) -> str | None:
    """A file that the compiler read (its own list, after all macros) beside `SOURCES`; or None."""
    for name in listed.split("\n"):
        if name and name not in SOURCES:
            return name
    return None


_LAST_LINE = re.compile(r"^(\d+) 2 0 0$\n?\Z", re.MULTILINE)


def cut_short(status: int, answers: str, end: int) -> bool:
    """Did an exam end before its testbench does? By the simulator's status and the recording."""
    last = _LAST_LINE.search(answers[-1000:])
    if status or last is None:
        return True
    return int(last[1]) < end


# ---- Judging ----

COMPILER = ["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012"]  # verilog-eval's options
_RUN_EXAM = ["vvp", "-n", "exam", "-none"]  # none: no waveform
_RUN_MARKING = ["vvp", "-n", "marking", "-none"]
_RUN_MARKING_WITH_WAVES = ["vvp", "-n", "marking"]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is gone afterward, whatever stands in it."""
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write files into a folder: {name: text}."""
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8", errors="replace")


def _read(path: Path) -> str:
    """A file's text; "" if there is no such file."""
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _check_room(folder: Path, limits: Limits) -> None:
    """Raise if the disk is nearly full.

    A compiler that finds no room writes half a file, and blames the answer for it.

    Raises:
      UserError: it is.
    """
    if shutil.disk_usage(folder).free >= limits.file:
        return
    needed = limits.file >> 20
    place = folder.parent
    raise UserError(f"judging needs {needed} MiB for temporary files, and {place} has less. Free "
                    "some, or set TMPDIR elsewhere; then run this again.")


def judge(problem: Problem, code: str | None, limits: Limits = DEFAULT,
          waves: str | os.PathLike | None = None) -> Verdict:
    """The `Verdict` on one answer; never raises for what it does, only for the machine's state.

    Args:
      code: Verilog text, or None where the model wrote none.
      limits: of each compilation and simulation.
      waves: where to put the waveform file (VCD), if one is wanted.

    Raises:
      UserError: Icarus is missing or was killed, TMPDIR is full, or the problem's testbench can't
        judge anything: nothing that an answer could be blamed for.
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
        _check_room(folder, limits)
        recorded = _examine(folder, exam, code, limits)
        verdict = recorded.verdict
        if verdict is None:
            verdict = _mark(folder, exam, code, recorded, limits, waves)
        if not verdict.passed:
            _check_room(folder, limits)
    return verdict


def drawn_letters() -> str:
    """What stands behind each name of the testbench in one exam: 64 bits that nobody can guess."""
    return "_" + secrets.token_hex(8)


def _compile(folder: Path, bench: str, code: str, limits: Limits) -> Ran:
    """Compile the exam, with letters drawn anew behind its names; the output has none of them.

    One more module stands behind the answer. If an open comment, condition or macro of the answer
    swallows it, the compiler misses it.
    """
    letters = drawn_letters()
    sources = {
        "bench.sv": bench.replace(programs.SECRET, letters),
        "top.sv": code,
        "end.sv": f"module End{letters}; logic end_of_exam; endmodule\n"}
    _write(folder, sources)

    tops = ["-s", f"tb{letters}", "-s", f"End{letters}"]
    command = [*COMPILER, *tops, "-Mall=files", "-o", "exam", *SOURCES]
    ran = run_limited(command, folder, limits)
    output = ran.output.replace(letters, "")
    return ran._replace(output=output)


@dataclass(frozen=True)
class _Recorded:
    """An exam that's over: a verdict, or else the outputs lie in answers.txt and await marking."""

    verdict: Verdict | None
    letter: str = ""  # of the compiler's words, with the line that decided
    why: str = ""
    log: str = ""


def _examine(folder: Path, exam: _Exam, code: str, limits: Limits) -> _Recorded:
    """Compile one answer's exam, look at what was compiled, and run it."""
    log, status, ended = _compile(folder, exam.bench, code, limits)
    if ended:
        verdict = _ended(ended, "compiling", limits, log)
        return _Recorded(verdict)

    letter, why, _ = analyze(log)
    program = folder / "exam"
    if status or not program.exists():
        if letter in ".RT":  # Icarus says sorry for what it doesn't know, and not error
            letter = "C"
            first_line = log.strip().partition("\n")[0]
            why = f"iverilog ended with {status}: {first_line[:150]}"
        verdict = _verdict(letter, why, code, log)
        return _Recorded(verdict)

    objection = _objection(folder, exam)
    if objection:
        verdict = Verdict("refused", objection, log=log)
        return _Recorded(verdict)

    _, status, ended = run_limited(_RUN_EXAM, folder, limits)
    if ended:
        verdict = _ended(ended, "simulating", limits, log)
        return _Recorded(verdict)
    if status not in (0, 1):
        verdict = _verdict("R", f"vvp ended with {status}", code, log)
        return _Recorded(verdict)
    answers = _read(folder / "answers.txt")
    if cut_short(status, answers, exam.end):
        verdict = Verdict("refused", "ends the simulation itself", log=log)
        return _Recorded(verdict)
    return _Recorded(None, letter, why, log)


def _objection(folder: Path, exam: _Exam) -> str | None:
    """Why a compiled exam isn't run; None where nothing speaks against it."""
    listed = _read(folder / "files")
    file = foreign_file(listed)
    if file:
        return f"reads another file: {file}"

    program = _read(folder / "exam")
    call = forbidden_call(program, exam.calls)
    if call:
        return f"calls {call}"
    if unbalanced_line(program):
        return "has a name with a quote in it"
    return None


def _mark(
        folder: Path,
        exam: _Exam,
        code: str,
        recorded: _Recorded,
        limits: Limits,
        waves: str | os.PathLike | None) -> Verdict:
    """Replay the outputs to testbench and reference: the `Verdict`."""
    _write(folder, {"marking": exam.marking})
    command = _RUN_MARKING if waves is None else _RUN_MARKING_WITH_WAVES
    marked, status, ended = run_limited(command, folder, limits)
    log = recorded.log + marked
    if waves is not None:
        _keep_waves(folder, Path(waves))
    if ended:
        return _ended(ended, "simulating", limits, log)

    letter, why, count = analyze(marked)
    # The compiler's words are half the answer's own: they may condemn it, and never acquit it.
    if recorded.letter not in ".R":
        return _verdict(recorded.letter, recorded.why, code, log, count)
    nothing_compared = count is not None and count.samples == 0
    if letter == "." and (nothing_compared or status):
        why = f"no sample compared, or vvp ended with {status}"
        return _verdict("R", why, code, log)
    return _verdict(letter, why, code, log, count)


def _keep_waves(folder: Path, waves: Path) -> None:
    """Copy the waveform out of the simulation's folder, if the testbench wrote one."""
    recording = folder / "wave.vcd"
    if recording.exists():
        text = _read(recording)
        waves.write_text(text, encoding="utf-8")


def _ended(limit: str, phase: str, limits: Limits, log: str) -> Verdict:
    """The `Verdict` on an answer that a limit ended."""
    if limit == "time":
        return Verdict(
            category="timeout",
            detail=f"{phase} took over {limits.seconds:g} s",
            letter="T",
            log=log)
    return Verdict(
        category="runtime",
        detail=f"{phase} printed over {limits.output} bytes",
        letter="R",
        log=log)


_NAMED: set[Problem] = set()  # the broken problems that were named


def _name_broken(problems: list[Problem], pool: ThreadPoolExecutor) -> None:
    """Before any answer is judged, name the problems whose own files don't compile; each once.

    Raises:
      UserError: as for `judge`.
    """
    broken = []
    exams = pool.map(_prepare, problems)
    for problem, exam in zip(problems, exams, strict=True):
        if isinstance(exam, Verdict) and problem not in _NAMED:
            broken.append(problem)
    if not broken:
        return

    _NAMED.update(broken)
    names = ", ".join(problem.name for problem in broken)
    version = ".".join(map(str, icarus_version()))
    print(f"{len(broken)} of {len(problems)} problems are broken: Icarus {version} can't compile "
          f"their own files, so no answer to them can pass ({names})")


def judge_many(candidates: Iterable[Pair], limits: Limits = DEFAULT) -> list[Verdict]:
    """Judge many (problem, code or None) pairs in parallel: verdicts in order, equal pairs once.

    One line is printed first if problems are among them whose own files don't compile.

    Raises:
      UserError: as for `judge`.
    """
    candidates = list(candidates)
    different = list(dict.fromkeys(candidates))
    problems = dict.fromkeys(problem for problem, _ in different)  # each once, in order

    def verdict_on(candidate: Pair) -> Verdict:
        problem, code = candidate
        return judge(problem, code, limits)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        _name_broken(list(problems), pool)
        verdicts = pool.map(verdict_on, different)
        by_candidate = dict(zip(different, verdicts, strict=True))
    return [by_candidate[candidate] for candidate in candidates]
