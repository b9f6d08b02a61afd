"""Judge a Verilog module that a language model wrote, by verilog-eval's rules, without trusting it.

A problem is three files, `*_prompt.txt`, `*_ref.sv` (RefModule) and `*_test.sv` (tb).
The candidate is compiled with the two, in a copy where every name of theirs carries a secret, and
what the compiler made of it is inspected before it runs: every system call, scope, driver and
reference stands in Icarus's output with the file it came from, after all macros, comments and
tricks of spelling are gone. Notebook 07 has a table of attacks and of the walls they meet.
"""

import contextlib
import functools
import itertools
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

from helpers.run import Progress, write_text

CATEGORIES = ("pass", "mismatch", "timeout", "runtime", "compile", "syntax", "refused", "no code")
REPOSITORY = "https://github.com/NVlabs/verilog-eval"
COMMIT = "c498220d0a52248f8e3fdffe279075215bde2da6"
_COERCED = "is coerced to inout"  # Icarus's warning about an input that is driven from inside
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
      ValueError: there is no problem in it.
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

    return [Problem(name, *(read(name, suffix) for suffix in (*suffixes, "_ifc.txt")))
            for name in names]


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
    for words in (("unshare", "-n", "--"), ("unshare", "-rn", "--")):
        if shutil.which(words[0]) and subprocess.run([*words, "true"],
                                                     capture_output=True).returncode == 0:
            return words
    return ()


_LIMITED = """ulimit -c 0; ulimit -t $1; ulimit -v $2 2>/dev/null; ulimit -f $3
[ "$4" = 0 ] || ulimit -u 0 2>/dev/null || ulimit -p 0 2>/dev/null
shift 4; exec "$@" """


@functools.cache
def tether():
    """Words before a command that is to end with the process that waits for it, even by kill -9."""
    words = ("setpriv", "--pdeathsig", "KILL", "--")
    if shutil.which(words[0]) and subprocess.run([*words, "true"],
                                                 capture_output=True).returncode == 0:
        return words
    return ()


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


# ---- The trusted files, with names that nobody can guess ----

_TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\\\S+|[$`]\w+
    |'[sS]?[bBoOdDhH]\s*[\w?]+|'[01xXzZ]|\d[\w.]*|[A-Za-z_][\w$]*|\s+|.""", re.S | re.X)
_TIMESCALE = re.compile(r"^[ \t]*`timescale\s+(\d+\s*[munpf]?s)\s*/\s*(\d+\s*[munpf]?s)[^\n]*",
                        re.M)
# Macros that are never called, and a rule that the text obeys.
_UNUSED = re.compile(r"^[ \t]*`(?:define\s+(\w+)\b(?!.*`\1\b)[^\n]*(?<!\\)"
                     r"|default_nettype\s+none\b[^\n]*)$", re.M | re.S)
_HIDDEN = "\0"  # stands behind each trusted name until a run of the judge has drawn its secret


@functools.lru_cache(maxsize=4096)
def _rehearsal(problem):
    """The problem with its own reference as the candidate: (compiled program, samples compared).

    Where the reference does not compile as a candidate, the program is that of testbench and
    reference alone; where it does not pass, samples is None.
    """
    top = problem.reference.replace("RefModule", "TopModule")
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        program = Path(folder) / "program"
        for name, text in (("top", top), ("test", problem.testbench), ("ref", problem.reference)):
            (Path(folder) / f"{name}.sv").write_text(text, encoding="utf-8")
        for more in (["top.sv"], ["-i"]):
            run_limited(["iverilog", "-g2012", "-s", "tb", "-o", "program", *more, "test.sv",
                         "ref.sv"], folder, Limits())
            if program.exists():
                break
        else:
            return "", None
        printed = run_limited(["vvp", "-n", "program", "-none"], folder, Limits(), file=0)[0]
        category, _, count = analyse(printed)
        return program.read_text(errors="replace"), count[1] if category == "pass" else None


@functools.lru_cache(maxsize=4096)
def _disguised(problem):
    """Testbench and reference for `problem`, every name of theirs with `_HIDDEN` behind it.

    What the candidate's text could still touch goes as well: comments (an open one would end at
    theirs) and directives (a candidate's macro may be called `timescale), which become `timeunit`.
    Empty modules with the plain names follow, so that defining one of them again stays the
    error that it is for verilog-eval. Strings and line numbers stay as they are.

    Returns:
      (testbench, reference, name of the top module), or None where TopModule is connected by `.*`.
    """
    texts, (listed, _) = [problem.testbench, problem.reference], _rehearsal(problem)
    for place, text in enumerate(texts):
        texts[place] = text = _UNUSED.sub("", text)
        if "`" in _TIMESCALE.sub("", text):  # macros of its own
            with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
                (Path(folder) / "in.sv").write_text(text, encoding="utf-8")
                run_limited(["iverilog", "-E", "-g2012", "-o", "out.sv", "in.sv"], folder, Limits())
                texts[place] = (Path(folder) / "out.sv").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:[SvPE]\w+|    \.port_info \d+) [./].*", listed, re.M)
    names = set(re.findall(r'"([A-Za-z_][\w$]*)[^"]*"', "\n".join(lines)))
    modules = set(re.findall(r"\bmodule\s+([A-Za-z_]\w*)", _without_comments(" ".join(texts))))
    names = (names | modules | {"tb"}) - {"TopModule"}
    scale = _TIMESCALE.search(texts[0])
    found = [_hide(text, names, scale) for text in texts]
    if None in found:
        return None
    stand_ins = " ".join(f"module {name}; endmodule" for name in sorted(modules))
    return found[0], f"{found[1]}\n{stand_ins}\n", f"tb{_HIDDEN}"


def _hide(text, names, scale):
    """One trusted file with `_HIDDEN` behind the names; the ports of TopModule keep theirs."""
    unit, precision = ("".join(part.split()) for part in scale.groups()) if scale else ("", "")
    units = f" timeunit {unit}; timeprecision {precision};" if scale else ""
    tokens = _TOKEN.findall(_TIMESCALE.sub("", text) if scale else text)
    words = [place for place, token in enumerate(tokens)
             if not (token.isspace() or token.startswith(("//", "/*")))]
    header, instance, depth = False, False, 0
    for place, after in zip(words, [*words[1:], None], strict=True):
        token, before = tokens[place], tokens[place - 1] if place else ""
        depth += (token in "([{") - (token in ")]}")
        if token == ";" and depth == 0:
            tokens[place] += units if header else ""
            header = instance = False
        header, instance = header or token == "module", instance or token == "TopModule"
        if instance and depth == 1 and before == "." and token == "*":
            return None
        if instance and depth == 1 and before == ".":
            if after is not None and tokens[after] != "(":
                tokens[place] += f"({token}{_HIDDEN * (token in names)})"
        elif token in names:
            tokens[place] += _HIDDEN
    return "".join(re.sub(r"[^\n]", " ", token) if token.startswith(("//", "/*")) else token
                   for token in tokens)


# ---- What the compiler made of a candidate ----

_HARMLESS = frozenset("$" + name for text in ("display", "write", "strobe", "monitor")
                      for name in (text, text + "b", text + "h", text + "o")) | frozenset(
    "$error $warning $info $sformat $sformatf $swrite $swriteb $swriteh $swriteo $time $stime "
    "$realtime $timeformat $printtimescale $signed $unsigned $bits $clog2 $countones $countbits "
    "$onehot $onehot0 $isunknown "
    "$size $left $right $low $high $increment $dimensions $unpacked_dimensions $rtoi $itor "
    "$realtobits $bitstoreal $shortrealtobits $bitstoshortreal $ln $log10 $exp $sqrt $pow $floor "
    "$ceil $sin $cos $tan $asin $acos $atan $atan2 $hypot $sinh $cosh $tanh $asinh $acosh $atanh "
    "$abs $min $max $cast".split())
_METHOD = re.compile(r"\$ivl_\w*method\$\w+$")  # what Icarus makes of x.size() and enum.next()
_CALL = re.compile(r'(?:L_\S+ +)?(?:%vpi_call|%vpi_func|\.sfunc)\S* +(\d+) +\d+ +"([^"]*)"')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCOPE = re.compile(r'(S_\w+) \.scope (\w+)\S*, "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)" (\d+) \d+'
                    r'(?:, (\d+) \d+ \d+)?(?:, (S_\w+))?')
_PORT = re.compile(r'\.port_info \d+ /(\w+) \d+ "((?:[^"\\]|\\.)*)"')
_DECLARED = re.compile(r'\S+ \.([a-z]+)\S* +(?:\*?"((?:[^"\\]|\\.)*)")?')
_DRIVERS = re.compile(r"(\d+) drivers")
_LABEL = re.compile(r"\b(?:v0x[0-9a-f]+(?:_\d+)*|(?:[A-Z]{1,2}_?|[a-z])0x[0-9a-f]+)")


@dataclass(frozen=True)
class Scope:
    """A module, task, block or package of a program; `trusted`: from testbench or reference."""

    trusted: bool
    sort: str
    name: str
    module: str
    parent: str


@dataclass(frozen=True)
class Declared:
    """A line that makes something: its label, what it is, and the labels it is made from."""

    scope: str
    label: str
    sort: str
    name: str
    drivers: int
    uses: tuple


class Program:
    """A compiled program (Icarus's vvp text), read once.

    Attributes:
      scopes: {label: `Scope`}.
      ports: {scope: {port: direction}}.
      declared: [`Declared`], nets, variables, events, parameters and gates.
      code: [(scope, labels used)], one per statement.
      offences: what the candidate's statements do that no design does, as text.
    """

    def __init__(self, text, testbench, reference):
        head, _, table = text.rpartition("\n:file_names ")
        files = re.findall(r'^    "(.*)";$', table, re.M)
        self.scopes, self.ports, self.declared, self.code, self.offences = {}, {}, [], [], []
        if testbench not in files or reference not in files:
            self.offences.append("the compiled program does not name its sources")
            return
        self.trusted = {str(files.index(testbench)), str(files.index(reference))}
        scope = ""
        for line in head.split("\n"):
            if found := _SCOPE.match(line):
                scope, sort, name, module, here, source, parent = found.groups()
                self.scopes[scope] = Scope((source or here) in self.trusted, sort, name, module,
                                           parent or "")
            elif line[:1].isspace():
                words = line.split(None, 2)
                scope = words[1].rstrip(";") if words[:1] == [".scope"] else scope
                self._statement(line.strip(), scope)
            elif line[:1] not in ";:#" and (label := _LABEL.match(line)):
                self._statement(line, scope) if ".sfunc" in line[:40] else None
                plain, made = _STRING.sub('""', line), _DECLARED.match(line)
                count = _DRIVERS.search(plain)
                sort, name = made.groups() if made else ("", "")
                self.declared.append(Declared(scope, label[0], sort, name or "",
                                              int(count[1]) if count else 0,
                                              tuple(_LABEL.findall(plain)[1:])))

    def _statement(self, text, scope):
        mine = scope in self.scopes and self.scopes[scope].trusted
        if text.startswith("%vpi_") or ".sfunc" in text[:40]:
            call = _CALL.match(text)
            if call is None:
                self.offences.append(f"unreadable system call: {text[:80]}")
            elif call[1] not in self.trusted and call[2] not in _HARMLESS \
                    and not _METHOD.match(call[2]):
                self.offences.append(f"calls {call[2]}")
        elif text.startswith(("%force", "%release")) and not mine:
            self.offences.append("forces a signal")
        elif text.startswith(".thread") and "$final" in text and not mine:
            self.offences.append("has a final block")
        elif text.startswith(".port_info") and (port := _PORT.match(text)):
            self.ports.setdefault(scope, {})[port[2]] = port[1]
        labels = tuple(_LABEL.findall(_STRING.sub('""', text))) if "0x" in text else ()
        if text[:1] == "." and "p0x" in text:  # .tran and its kin, a switch between two nets
            self.declared.append(Declared(scope, "", "tran", "", 0, labels))
        elif labels and text[0] in "%.":
            self.code.append((scope, labels))


def inspect_program(program, testbench, reference):
    """Say why a compiled program (Icarus's vvp text) must not run or count; None where it may.

    Args:
      program: the text of the compiled file.
      testbench, reference: names of the two trusted files in it; all else is the candidate's.
    """
    program = Program(program, testbench, reference)
    return next(iter(program.offences), None) or foreign_scope(program) or driven_input(program) \
        or decoy(program) or foreign_reference(program)


def foreign_scope(program):
    """A scope where it does not belong: one of the trusted files below the candidate's, or back."""
    for scope in program.scopes.values():
        above = program.scopes.get(scope.parent)
        if scope.trusted and not (above.trusted if above else scope.sort == "module"):
            return f"uses {scope.module} of the testbench"
        if not scope.trusted and (above.trusted if above else scope.sort != "package"):
            if above is None or (scope.sort, scope.module) != ("module", "TopModule"):
                return f"adds {scope.name} to the testbench"
    return None


def tops(program):
    """Labels of the scopes in which the testbench holds the candidate."""
    return [label for label, scope in program.scopes.items()
            if not scope.trusted and scope.parent in program.scopes
            and program.scopes[scope.parent].trusted]


def driven_input(program):
    """An input that is no input, or that the candidate drives: why, or None."""
    wanted, top = _reference_inputs(program), tops(program)
    for label, name in itertools.product(top, wanted):
        given = program.ports.get(label, {}).get(name, "INPUT")
        if given != "INPUT":
            return f"declares the input {name} as {given.lower()}"
    guarded = {*top} | {label for label, scope in program.scopes.items()
                        if scope.module == "RefModule"}
    for made in program.declared:
        switched = any(label.startswith("p0x") for label in made.uses)  # tran drives both its ends
        if made.sort == "net" and made.scope in guarded and (made.drivers > 1 or switched) \
                and program.ports.get(made.scope, {}).get(made.name) == "INPUT":
            return f"drives the input {made.name}"
    return None


def _reference_inputs(program):
    return [name for label, scope in program.scopes.items() if scope.module == "RefModule"
            for name, direction in program.ports.get(label, {}).items() if direction == "INPUT"]


def decoy(program):
    """A package or `$unit` of the candidate's that has a name of the testbench's, or None.

    Compiled alone, such a name would stand in for the testbench's own."""
    own = {name for label in tops(program) for name in program.ports.get(label, ())}
    taken = {scope.name for scope in program.scopes.values() if scope.trusted} | {
        made.name for made in program.declared
        if made.scope in program.scopes and program.scopes[made.scope].trusted
        and not program.scopes[made.scope].parent} - own
    packages = {label for label, scope in program.scopes.items() if scope.sort == "package"}
    names = {scope.name for scope in program.scopes.values()
             if scope.sort == "package" or scope.parent in packages} | {
        made.name for made in program.declared if made.scope in packages}
    clash = sorted((names & taken) - {""})
    return f"declares {clash[0]}, a name of the testbench, outside its module" if clash else None


def foreign_reference(program):
    """A reference across the border between candidate and trusted files, except by a port; or None.

    Nets that are one electrically share a driver and its label. Such a label may be used across the
    border if its net is one of the candidate's inputs (by the testbench: outputs, too), or if it is
    a constant; an event if it is one of such a net. Where several drivers meet (`.resolv`) no input
    may have one of the candidate's, and no output one of the testbench's. Statements get no such
    allowance: a statement names the object that it means.
    """
    owner, joined, made_by = {label: label for label in program.scopes}, {}, {}
    for made in program.declared:
        owner.setdefault(made.label, made.scope)
        made_by.setdefault(made.label, []).append(made)

    def root(label):
        while label in joined:
            label = joined[label]
        return label

    for made in program.declared:
        for other in made.uses[-1:] if made.sort == "net" else ():
            if root(other) != root(made.label):
                joined[root(other)] = root(made.label)
    top = {label: program.ports.get(label, {}) for label in tops(program)}
    wanted = _reference_inputs(program)
    inputs, outputs = set(), set()
    for made in program.declared:
        direction = top.get(made.scope, {}).get(made.name)
        direction = "INPUT" if direction and made.name in wanted else direction
        inputs |= {root(made.label)} if direction in ("INPUT", "INOUT") else set()
        outputs |= {root(made.label)} if direction in ("OUTPUT", "INOUT") else set()

    def trusted(label):
        scope = program.scopes.get(owner.get(label))
        return scope is not None and scope.trusted

    def constant(label):
        return label[0] in "Lo" and not any(made.uses for made in made_by[label])

    def allowed(label, by_trusted):
        if root(label) in inputs or constant(label):
            return True
        if label.startswith("E_"):
            return not any(made.name for made in made_by[label]) and all(
                trusted(use) == by_trusted or allowed(use, by_trusted)
                for made in made_by[label] for use in made.uses if use != label)
        return root(label) in outputs and (by_trusted or label.startswith(("RS_", "p0x", "o0x"))
                                           or all(made.sort == "net" for made in made_by[label]))

    def crosses(made, label):
        mine, net = program.scopes[made.scope].trusted, root(made.label)
        if made.sort == "tran":
            foreign = trusted(label) and root(label) not in outputs
            return not mine and (foreign or root(label) in inputs)
        if made.sort not in ("resolv", "port"):
            return trusted(label) != mine and not allowed(label, mine)
        if constant(label) or not trusted(label):  # whose a constant is, its line does not tell
            return net in inputs or mine and net not in outputs and not constant(label)
        return root(label) not in inputs and (net in outputs or not mine)

    for made in program.declared:
        for label in made.uses:
            if label in owner and label[0] != "I" and made.scope and crosses(made, label):
                return f"reaches {_said(program, made_by, owner, label)} past its ports"
    for scope, labels in program.code:
        for label in labels:
            if label in owner and trusted(label) != trusted(scope) \
                    and not (label[0] == "E" and allowed(label, trusted(scope))):
                return f"reaches {_said(program, made_by, owner, label)} past its ports"
    return None


def _said(program, made_by, owner, label):
    name = next((made.name for made in made_by.get(label, ()) if made.name), "")
    name = name or (program.scopes[label].name if label in program.scopes else "a signal")
    scope = program.scopes.get(owner[label] if label not in program.scopes
                               else program.scopes[label].parent)
    return f"{scope.name}.{name}" if scope else name


# ---- Judging ----

def judge(problem, code, limits=Limits(), waves=None):
    """Judge one candidate; never raises for what the candidate does, only for the machine's state.

    Args:
      problem: a `Problem`.
      code: Verilog text, or None where the model wrote none.
      limits: `Limits` of the compilation and of the simulation.
      waves: where to put the waveform file (VCD), if one is wanted.

    Returns:
      A `Verdict`.

    Raises:
      ValueError: Icarus is missing or was killed, or TMPDIR is full: nothing that a candidate could
        be blamed for.
    """
    icarus_version()
    start = time.perf_counter()
    if code is None or not code.strip():
        return Verdict("no code", "the answer holds no module")
    if problem.missing:
        missing = ", ".join(problem.missing)
        return Verdict("compile", f"the problem's own files are missing: {missing}")
    with tempfile.TemporaryDirectory(prefix="judge-", ignore_cleanup_errors=True) as folder:
        _room(folder, limits)
        category, detail, count, log = _judge_in(Path(folder), problem, code, limits, waves)
        if category != "pass":
            _room(folder, limits)
    mismatches, samples = count or (None, None)
    wanted = _rehearsal(problem)[1] if category == "pass" else None
    if wanted is not None and wanted != samples:
        category, detail = "refused", f"{samples} samples instead of the reference's {wanted}"
    return Verdict(category, detail, mismatches, samples, log, time.perf_counter() - start)


def _room(folder, limits):
    """A compiler that finds no room writes half a file, and blames the candidate for it."""
    if shutil.disk_usage(folder).free < limits.file:
        raise ValueError(f"judging needs {limits.file >> 20} MiB for temporary files, and "
                        f"{Path(folder).parent} has less. Free some, or set TMPDIR elsewhere; then "
                        "run this again.")


def _compile(folder, limits, top, sources):
    """Compile as verilog-eval does: (what the compiler printed, its exit status, limit or None)."""
    (folder / "program").unlink(missing_ok=True)
    return run_limited(["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012", "-s", top,
                        "-Mall=files", "-o", "program", *sources], folder, limits)


def _judge_in(folder, problem, code, limits, waves):
    secret = secrets.token_hex(8)  # in every name of the trusted files, and in theirs
    mark = secrets.token_hex(8)    # on the testbench's own line; %m shows names, so this is another
    testbench, reference = f"test{secret}.sv", f"ref{secret}.sv"
    plain = '"Mismatches: '
    if plain not in problem.testbench:
        return "compile", "the problem's testbench prints no Mismatches line", None, ""
    if re.search(r"`\s*(?:include|line)\b", _without_comments(code)):
        return "refused", "names another file (`include or `line)", None, ""
    trusted = _disguised(problem)
    if trusted is None:
        return "compile", "the testbench connects TopModule by .*: name its ports", None, ""
    *texts, top = trusted
    (folder / "top.sv").write_text(code, encoding="utf-8", errors="replace")
    for name, text in zip((testbench, reference), texts, strict=True):
        text = text.replace(plain, f'"{mark}{plain[1:]}').replace(_HIDDEN, f"_{secret}")
        (folder / name).write_text(text, encoding="utf-8")
    sources = ["top.sv", testbench, reference]
    compiled, status, ended = _compile(folder, limits, top.replace(_HIDDEN, f"_{secret}"), sources)
    log = compiled.replace(f"_{secret}", "")
    if ended:
        return _ended(ended, "compiling", limits, log)
    program = folder / "program"
    if status or not program.exists():
        category, detail, _ = analyse(log)
        if category != "syntax" and _needs_plain_names(folder, problem, limits):
            return "refused", "names something of the testbench's or the reference's", None, log
        return ("compile", f"iverilog ended with {status}: {detail}", None, log) \
            if category in ("pass", "mismatch", "runtime") else (category, detail, None, log)
    files = (folder / "files").read_text(errors="replace").split("\n")
    if [name for name in files if name] != sources:
        return "refused", "reads another file", None, log
    text = program.read_text(errors="replace").replace(f"_{secret}", "")
    reason = inspect_program(text, testbench, reference) \
        or ("drives an input" if _COERCED in compiled else None)
    if reason:
        return "refused", reason, None, log
    wave = [] if waves else ["-none"]
    printed, status, ended = run_limited(["vvp", "-n", "program", *wave], folder, limits,
                                         file=limits.file if waves else 0, alone=True)
    if waves and (folder / "wave.vcd").exists():
        wave = (folder / "wave.vcd").read_text(errors="replace").replace(f"_{secret}", "")
        write_text(waves, wave)
    lines = (compiled + printed).splitlines()
    printed = _disown(printed, mark)
    log += printed.replace(f"_{secret}", "").replace(mark, "")
    if _forged(lines, mark):
        return "refused", "prints the testbench's own line", None, log
    if ended:
        return _ended(ended, "simulating", limits, log)
    category, detail, count = analyse(log)
    if category == "pass" and (count[1] == 0 or status):
        return "runtime", f"no sample compared, or vvp ended with {status}", count, log
    if category == "pass" and (reason := _leans_on_others(folder, limits)):
        return "refused", reason, count, log
    return category, detail, count, log


def _forged(lines, mark):
    """True where a line of the testbench's form does not carry its mark, or more than one does."""
    return any(MISMATCH_LINE.match(line) for line in lines) \
        or sum(line.startswith(f"{mark}Mismatches:") for line in lines) > 1


def _disown(printed, mark):
    """What was printed, with no line of the testbench's form left but the marked one."""
    return re.sub(rf"(?<!{mark})Mismatches: ", "mismatches: ", printed)


def _needs_plain_names(folder, problem, limits):
    """True where a candidate compiles only while the trusted files have the names it expects."""
    for name, text in (("test.sv", problem.testbench), ("ref.sv", problem.reference)):
        (folder / name).write_text(text, encoding="utf-8")
    _, status, ended = _compile(folder, limits, "tb", ["top.sv", "test.sv", "ref.sv"])
    return not (status or ended)


def _ended(limit, phase, limits, log):
    if limit == "time":
        return "timeout", f"{phase} took over {limits.seconds:g} s", None, log + "\nTIMEOUT\n"
    return "runtime", f"{phase} printed over {limits.output} bytes", None, log


def _leans_on_others(folder, limits):
    """A module that reaches testbench or reference by name does not compile alone: why, or None."""
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
    network_guard(), tether()
    different = list(dict.fromkeys(candidates))
    progress, verdicts = Progress(len(different), text), {}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        pending = {pool.submit(judge, *candidate, limits): candidate for candidate in different}
        for done in as_completed(pending):
            verdicts[pending[done]] = done.result()
            progress.update(note=f"{sum(v.passed for v in verdicts.values())} pass")
    return [verdicts[candidate] for candidate in candidates]
