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
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tables.errors import UserError
from verilog.sandbox import Limits, icarus_version, run_limited

LONGEST = 1 << 20  # characters of an answer


@dataclass(frozen=True)
class Verdict:
    """What became of one answer."""

    category: str     # pass, mismatch, timeout, runtime, compile, syntax, refused or no code
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


# ---- The three programs: questions, exam, marking ----

_COMMENT = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_SCALE = re.compile(r"`timescale\s+\d+\s*[munpf]?s\s*/\s*(\d+)\s*([munpf]?s)")
_UNITS = ("s", "ms", "us", "ns", "ps", "fs")
_PORT = re.compile(r'\.port_info \d+ /(\w+) (\d+) "((?:[^"\\]|\\.)*)"')

# Compiled behind the answer: what an open comment, condition or macro of it swallows is missed.
END = "module EndOfExam; logic end_of_exam; endmodule\n"


@dataclass(frozen=True)
class _Exam:
    """What all answers to one problem share, or the verdict on all where the problem is broken."""

    broken: Verdict | None = None
    files: dict | None = None
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
    """Sources of the three programs, and of an empty answer, for [(direction, width, name)]."""
    units = [(_UNITS.index(unit), -int(number), f"{number}{unit}")
             for number, unit in _SCALE.findall(problem.testbench + problem.reference)]
    ins, outs = ([port for port in ports if (port[0] == "INPUT") == wanted]
                 for wanted in (True, False))
    listed, read = (", ".join(name for _, _, name in each) for each in (outs, ins))
    by_name = _connected(problem.testbench) is not None
    listing = read or "1'b0"

    def kind(name):  # unlike a wire, a `logic` of the testbench bears no second driver
        wire = re.search(rf"\bwire\b[^;]*\b{re.escape(name)}(_dut)?\b", _COMMENT.sub(" ", problem.testbench))
        return "wire" if wire else "logic"
    note = f'$fdisplay(file, "%0d %b", $time, {{{listing}}});'
    words = {
        "unit": " timeunit {0}; timeprecision {0};".format(max(units)[2]) if units else "",
        "ports": ", ".join(f"{'input' if way == 'INPUT' else 'output reg'} [{width - 1}:0] {name}"
                           for way, width, name in ports),
        "note": note, "ever": "forever" if ins else "if (0)",
        "at_edges": "\n  ".join(f"always @({edge} {name}) {note}" for _, width, name in ins
                                if width == 1 for edge in ("posedge", "negedge")),
        "at_ins": f"@({read.replace(',', ' or')})" if ins else "#1",
        "ins": read or "no_input", "outs": listed or "1'b0",
        "wide": max(0, sum(width for _, width, _ in ins) - 1),
        "many": max(0, sum(width for _, width, _ in outs) - 1),
        "nets": "\n  ".join(
            f"reg [{width - 1}:0] {name} = vector[{sum(w for _, w, _ in ins[place:]) - 1} -: {width}];"
            for place, (_, width, name) in enumerate(ins)) + "".join(
            f"\n  {kind(name)} [{width - 1}:0] {name};" for _, width, name in outs),
        "connections": ", ".join(f".{name}({name})" if by_name else name for _, _, name in ports)}
    trusted = _COMMENT.sub(" ", problem.testbench + problem.reference)
    taken = "".join(f"module {name}; endmodule\n" for name in sorted(
        {*re.findall(r"\bmodule\s+(\w+)", trusted)} - {"TopModule"}))

    def filled(name):
        text = (Path(__file__).parent / name).read_text(encoding="utf-8")
        return re.sub(r"@(\w+)@", lambda found: str(words[found[1]]), text)
    return {"questions.sv": filled("questions.sv"), "bench.sv": filled("exam.sv") + taken,
            "marking.sv": filled("marking.sv"), "end.sv": END,
            "top.sv": f"module TopModule({words['ports']}); endmodule\n"}


def _ports_of(problem):
    """Ports of the reference: ((direction, width, name), ...); () where it does not compile."""
    with _folder() as folder:
        (folder / "ref.sv").write_text(problem.reference, encoding="utf-8")
        run_limited(["iverilog", "-g2012", "-s", "RefModule", "-o", "ref", "ref.sv"], folder,
                    Limits())
        listing = _read(folder / "ref")
    found = re.search(r'^S_\w+ \.scope module, "RefModule".*?(?=^S_|\Z)', listing,
                      re.MULTILINE | re.DOTALL)
    ports = _PORT.findall(found[0]) if found else ()
    return tuple((way, int(width), name) for way, width, name in ports)


@functools.lru_cache(maxsize=4096)
def _prepare(problem):
    """Run the questions, and compile what all answers share: an `_Exam`."""
    named, by_reference = _connected(problem.testbench), _ports_of(problem)
    known = {name: (way, width, name) for way, width, name in by_reference}
    ports = by_reference if named is None else \
        [known.get(name, ("OUTPUT", 1, name)) for name in named]
    if not ports:
        return _Exam(Verdict("compile", "the reference does not compile, or no TopModule is tested"))
    texts = _write_programs(problem, ports)
    with _folder() as folder:
        _write(folder, {**texts, "test.sv": problem.testbench, "ref.sv": problem.reference})
        for name in ("questions", "marking"):
            said, status, ended = run_limited(
                ["iverilog", "-g2012", "-s", "tb", "-o", name, f"{name}.sv", "test.sv", "ref.sv"],
                folder, Limits())
            if status or ended:
                return _Exam(Verdict("compile", "the problem's own files do not compile: "
                                     + said.partition("\n")[0][:150]))
        run_limited(["vvp", "-n", "questions", "-none"], folder, Limits())
        _compile(folder, Limits())
        lines = _read(folder / "questions.txt").splitlines()
        asked = [line for line, last in zip(lines, ["", *lines], strict=False) if line != last]
        shared = {"bench.sv": texts["bench.sv"], "end.sv": END,
                  "questions.txt": "\n".join([*asked, *lines[-1:], ""])}
        return _Exam(None, shared, _read(folder / "marking"),
                     collections.Counter(_CALL.findall(_read(folder / "exam"))))


# ---- What an answer may call ----

# Nothing in harmless.txt opens a file or starts a program; the bench's own calls are counted apart.
# Wherever a call stands in the compiled text, and even inside a string, it counts.
_CALL = re.compile(r'(?:%vpi_call|%vpi_func|\.sfunc)[^"]*"([^"]*)"')
_HARMLESS = frozenset((Path(__file__).parent / "harmless.txt").read_text().split())
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


def foreign_file(listed):
    """A file that the compiler read (its own list, after all macros) beside `SOURCES`; or None."""
    return next((name for name in listed.split("\n") if name and name not in SOURCES), None)


def cut_short(status, answers):
    """Whether an exam did not come to its end, by the simulator's status and the recording."""
    return bool(status) or not re.search(r"^\d+ 2 0$", answers[-10_000:], re.MULTILINE)


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
    if exam.broken:
        return exam.broken
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


def _compile(folder, limits):
    """Compile the exam: (what was printed, exit status, limit)."""
    return run_limited([*COMPILER, "-s", "ExamOfTopModule", "-s", "EndOfExam", "-Mall=files", "-o",
                        "exam", *SOURCES], folder, limits)


def _judge_in(folder, exam, code, limits, waves):
    """The `Verdict` of one answer, in a folder of its own."""
    _write(folder, {**exam.files, "top.sv": code})
    log, status, ended = _compile(folder, limits)
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
    if call := forbidden_call(_read(folder / "exam"), exam.calls):
        return Verdict("refused", f"calls {call}", log=log)
    _, status, ended = run_limited(["vvp", "-n", "exam", "-none"], folder, limits)
    if ended:
        return _ended(ended, "simulating", limits, log)
    if status not in (0, 1):
        return _verdict("R", f"vvp ended with {status}", code, log)
    if cut_short(status, _read(folder / "answers.txt")):
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
