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

from tables.errors import UserError
from verilog import programs
from verilog.problems import Problem
from verilog.sandbox import Limits, Ran, icarus_version, run_limited

LONGEST = 1 << 20  # characters of an answer
DEFAULT = Limits()

Count = tuple[int, int]  # mismatches, samples


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

# The first line with one of the first texts decides, then of the second; a count comes last.
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


def analyse(log: str) -> tuple[str, str, Count | None]:
    """The official analyser's rules for a log: (letter, why, (mismatches, samples) or None).

    The letter is `.` for a pass, S e 0 n w m c p C for what did not compile, T for a timeout and R
    for any other failure at run time. The count is the log's last; as in verilog-eval, a log passes
    in which any count says 0. (Theirs also reads what the answer prints, so a plain $display wins.)
    """
    log = log.replace("\r", "\n")
    counts = [(int(wrong), int(samples)) for wrong, samples in _MISMATCHES.findall(log)]
    count = counts[-1] if counts else None
    for letters in _DECIDES:
        for line in log.split("\n"):
            letter = _letter_of(line, letters)
            if letter is not None:
                return letter, line.strip(), count
    for wrong, _ in counts:
        if wrong == 0:
            return ".", "", count
    if count is None:
        return "R", "the testbench never reported", None
    return "R", f"{count[0]} of {count[1]} samples differ", count


def _letter_of(line: str, letters: dict[str, str]) -> str | None:
    """The letter of the first text that stands in the line; None where none does."""
    for text, letter in letters.items():
        if text in line:
            return letter
    return None


def _verdict(letter: str, why: str, code: str, log: str, count: Count | None = None) -> Verdict:
    """A `Verdict` by verilog-eval's letter, which also knows `r`: R, and an asynchronous reset."""
    if letter == "R":
        category = "runtime" if count is None else "mismatch"
        for text in _ASYNCHRONOUS:
            if text in code:
                letter = "r"
    else:
        category = _CATEGORIES.get(letter, "compile")
    mismatches, samples = count if count is not None else (None, None)
    return Verdict(category, why, letter, mismatches, samples, log)


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
    why = f"the problem's own files don't compile: {first_line[:150]}"
    return Verdict("broken problem", why, "C", log=log)


def _made(problem: Problem) -> _Exam:
    """Compile the marking, and run both programs with an empty answer."""
    with _folder() as folder:
        _check_room(folder, DEFAULT)
        _write(folder, {"test.sv": problem.testbench, "ref.sv": problem.reference})
        _compile_own(problem, folder, "-s", "RefModule", "-o", "ref", "ref.sv")
        compiled = _read(folder / "ref")
        reference = programs.reference_ports(compiled)
        events = programs.reference_events(compiled, reference)
        ports = programs.tested_ports(problem.testbench, reference)
        _write(folder, {"marking.sv": programs.marking(problem, ports)})
        sources = ("marking.sv", "test.sv", "ref.sv")
        _compile_own(problem, folder, "-s", "tb", "-o", "marking", *sources)
        _compile_own(problem, folder, "-E", "-o", "plain.sv", "test.sv")
        marking = _read(folder / "marking")
        scopes = programs.scope_names(marking)
        bench = programs.exam(problem, _read(folder / "plain.sv"), ports, scopes, events)
        end = _rehearse(problem, folder, bench, programs.empty_answer(ports))
        return _Exam(bench, marking, system_calls(_read(folder / "exam")), end)


def _rehearse(problem: Problem, folder: Path, bench: str, empty: str) -> int:
    """Let an empty answer take the exam, mark it, and return the time at which the exam ended."""
    log, status, ended = _compile(folder, bench, empty, DEFAULT)
    if status or ended:
        raise _broken(problem, f"its testbench doesn't compile without the reference: {log}")
    _, _, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, DEFAULT)
    last = _LAST_LINE.search(_read(folder / "answers.txt"))
    if ended or last is None:
        raise _broken(problem, "its testbench doesn't come to an end")
    printed, _, _ = run_limited(["vvp", "-n", "marking", "-none"], folder, DEFAULT)
    _, _, count = analyse(printed)
    if count is None:
        raise _broken(problem, 'its testbench prints no line "Mismatches: 0 in 9 samples"')
    return int(last[1])


def _compile_own(problem: Problem, folder: Path, *words: str) -> None:
    """Run the compiler on the problem's own files.

    Raises:
      _DoesNotCompile: it names a line of theirs, or a module that isn't there.
      UserError: it fails for another reason.
    """
    log, status, ended = run_limited(["iverilog", "-g2012", *words], folder, DEFAULT)
    if status == 0 and ended is None:
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
        if line.count('"') % 2 == 0 and "\\" not in line:
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

@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _check_room(folder: Path, limits: Limits) -> None:
    """A compiler that finds no room writes half a file, and blames the answer for it."""
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


COMPILER = ["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012"]  # verilog-eval's options


def drawn_letters() -> str:
    """What stands behind each name of the testbench in one exam: 64 bits that nobody can guess."""
    return "_" + secrets.token_hex(8)


def _compile(folder: Path, bench: str, code: str, limits: Limits) -> Ran:
    """Compile the exam, with names drawn anew; in what was printed they stand as they were.

    Behind the answer stands one more module: what an open comment, condition or macro of the answer
    swallows is missed.
    """
    letters = drawn_letters()
    bench = bench.replace(programs.SECRET, letters)
    end = f"module End{letters}; logic end_of_exam; endmodule\n"
    _write(folder, {"bench.sv": bench, "top.sv": code, "end.sv": end})
    tops = ["-s", f"tb{letters}", "-s", f"End{letters}"]
    command = [*COMPILER, *tops, "-Mall=files", "-o", "exam", *SOURCES]
    ran = run_limited(command, folder, limits)
    return ran._replace(output=ran.output.replace(letters, ""))


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
        return _Recorded(_ended(ended, "compiling", limits, log))
    letter, why, _ = analyse(log)
    if status or not (folder / "exam").exists():
        if letter in ".RT":
            letter, why = "C", f"iverilog ended with {status}: {why}"
        return _Recorded(_verdict(letter, why, code, log))
    objection = _objection(folder, exam)
    if objection:
        return _Recorded(Verdict("refused", objection, log=log))
    _, status, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, limits)
    if ended:
        return _Recorded(_ended(ended, "simulating", limits, log))
    if status not in (0, 1):
        return _Recorded(_verdict("R", f"vvp ended with {status}", code, log))
    if cut_short(status, _read(folder / "answers.txt"), exam.end):
        return _Recorded(Verdict("refused", "ends the simulation itself", log=log))
    return _Recorded(None, letter, why, log)


def _objection(folder: Path, exam: _Exam) -> str | None:
    """Why a compiled exam isn't run; None where nothing speaks against it."""
    file = foreign_file(_read(folder / "files"))
    if file:
        return f"reads another file: {file}"
    program = _read(folder / "exam")
    call = forbidden_call(program, exam.calls)
    if call:
        return f"calls {call}"
    if unbalanced_line(program):
        return "has a name with a quote in it"
    return None


def _mark(folder: Path, exam: _Exam, code: str, recorded: _Recorded, limits: Limits,
          waves: str | os.PathLike | None) -> Verdict:
    """Replay the outputs to testbench and reference: the `Verdict`."""
    _write(folder, {"marking": exam.marking})
    command = ["vvp", "-n", "marking"]
    if waves is None:
        command.append("-none")
    marked, status, ended = run_limited(command, folder, limits)
    log = recorded.log + marked
    if waves is not None and (folder / "wave.vcd").exists():
        Path(waves).write_text(_read(folder / "wave.vcd"), encoding="utf-8")
    if ended:
        return _ended(ended, "simulating", limits, log)
    letter, why, count = analyse(marked)
    # The compiler's words are half the answer's own: they may condemn it, and never acquit it.
    if recorded.letter not in ".R":
        return _verdict(recorded.letter, recorded.why, code, log, count)
    nothing_compared = count is not None and count[1] == 0
    if letter == "." and (nothing_compared or status):
        why = f"no sample compared, or vvp ended with {status}"
        return _verdict("R", why, code, log)
    return _verdict(letter, why, code, log, count)


def _ended(limit: str, phase: str, limits: Limits, log: str) -> Verdict:
    """The `Verdict` on an answer that a limit ended."""
    if limit == "time":
        return Verdict("timeout", f"{phase} took over {limits.seconds:g} s", "T", log=log)
    return Verdict("runtime", f"{phase} printed over {limits.output} bytes", "R", log=log)


_NAMED: set[Problem] = set()  # the broken problems that were named


def _name_broken(problems: list[Problem], pool: ThreadPoolExecutor) -> None:
    """Before any answer is judged, name the problems whose own files don't compile; each once.

    Raises:
      UserError: as for `judge`.
    """
    version = ".".join(str(number) for number in icarus_version())
    broken = []
    for problem, exam in zip(problems, pool.map(_prepare, problems), strict=True):
        if isinstance(exam, Verdict) and problem not in _NAMED:
            broken.append(problem)
    if not broken:
        return
    _NAMED.update(broken)
    names = ", ".join(problem.name for problem in broken)
    print(f"{len(broken)} of {len(problems)} problems are broken: Icarus {version} can't compile "
          f"their own files, so no answer to them can pass ({names})")


def judge_many(candidates: Iterable[tuple[Problem, str | None]],
               limits: Limits = DEFAULT) -> list[Verdict]:
    """Judge many (problem, code or None) pairs in parallel: verdicts in order, equal pairs once.

    One line is printed first if problems are among them whose own files don't compile.

    Raises:
      UserError: as for `judge`.
    """
    candidates = list(candidates)
    different = list(dict.fromkeys(candidates))
    problems = [problem for problem, _ in different]
    codes = [code for _, code in different]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        _name_broken(list(dict.fromkeys(problems)), pool)
        verdicts = pool.map(lambda problem, code: judge(problem, code, limits), problems, codes)
        by_candidate = dict(zip(different, verdicts, strict=True))
    return [by_candidate[candidate] for candidate in candidates]
