"""Write right and wrong answers that differ in what happens inside a time step, and hold the judge
against one program on them.

    VERILOG_EVAL_DIR=/path/to/verilog-eval .venv/bin/python tests/hostile/mutants.py

Each answer is a problem's reference, as it is or with one mutation, inside of a module that
buffers, gates or delays its clock, its inputs and its outputs. Half of them are asked by a
testbench whose nonblocking assignments are blocking ones. verilog-eval compiles answer, reference
and testbench into one program; what that says is what the judge should say. The result is
`mutants.csv`.
"""

import argparse
import collections
import csv
import dataclasses
import itertools
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hostile")]

import generate

from tables.errors import UserError
from verilog import judging, problems as exams, sandbox

RESULT = Path(__file__).with_name("mutants.csv")

# How the answer makes its own clock `clk_c` from `clk`.
CLOCKS = {
    "as it is": "wire clk_c; assign clk_c = clk;",
    "buffered": "wire clk_d, clk_c; buf first(clk_d, clk); buf second(clk_c, clk_d);",
    "and 1": "wire clk_c = clk & 1'b1;",
    "gated": "reg clk_on = 1; wire clk_c = clk & clk_on;",
    "gated by a latch": "reg clk_on; always @(*) if (!clk) clk_on = 1; wire clk_c = clk & clk_on;",
    "inverted twice": "wire clk_d = ~clk; wire clk_c = ~clk_d;",
    "by always": "reg clk_c; always @(*) clk_c = clk;",
    "nonblocking": "reg clk_c; always @(clk) clk_c <= clk;",
    "nonblocking twice": "reg clk_c, clk_d; always @(clk) clk_d <= clk; "
                         "always @(clk_d) clk_c <= clk_d;",
    "after #0": "reg clk_c; always @(clk) #0 clk_c = clk;",
    "net after #0": "wire #0 clk_c = clk;",
    "pulse": "reg clk_c = 0; always @(posedge clk) begin clk_c = 1; #0 clk_c = 0; end",
}
# How it passes an input on, {i} as {o}.
INPUTS = {
    "as it is": "wire {w}{o} = {i};",
    "inverted twice": "wire {w}n_{o} = ~{i}; wire {w}{o} = ~n_{o};",
    "nonblocking": "reg {w}{o}; always @({i}) {o} <= {i};",
    "after #0": "reg {w}{o}; always @({i}) #0 {o} = {i};",
}
# How it makes its output {o} from {i}.
OUTPUTS = {
    "as it is": "assign {o} = {i};",
    "net after #0": "assign #0 {o} = {i};",
    "by always": "always @(*) {o} = {i};",
    "nonblocking": "always @(*) {o} <= {i};",
    "after #0": "always @({i}) #0 {o} = {i};",
    "glitch and #0": "always @(*) begin {o} = ~{i}; #0 {o} = {i}; end",
    "glitch and #0 twice": "always @({i}) begin {o} = ~{i}; #0 {o} = 0; #0 {o} = {i}; end",
    "glitch and nonblocking": "always @(*) begin {o} = ~{i}; {o} <= {i}; end",
    "after #1": "assign #1 {o} = {i};",
    "after half a clock": "always @({i}) {o} <= #5 {i};",
    "with the clock": "assign {o} = clk ? {i} : {i};",
}
SWAPS = {"&&": "||", "||": "&&", "&": "|", "|": "&", "^": "&", "+": "-", "-": "+", "==": "!=",
         "!=": "==", "~": "", "!": "", " < ": " > ", " > ": " < ", "<<": ">>", ">>": "<<"}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One answer, and what was done to make it."""

    problem: exams.Problem
    bench: str     # as it is, or blocking
    mutation: str  # none, operator, edge, constant, condition, branch or range
    clock: str
    inputs: str
    outputs: str
    code: str


# ---- Mutations ----

def _swapped(pattern: str, change, text: str, generator: random.Random) -> str | None:
    """The text with one match after the module's header changed; None where there is no match."""
    matches = list(re.finditer(pattern, text[text.index(";"):]))
    if not matches:
        return None
    match = generator.choice(matches)
    start, stop = (text.index(";") + place for place in match.span())
    return text[:start] + change(match) + text[stop:]


def _number_changed(match: re.Match) -> str:
    base, digits = match[1] or "", match[2]
    if base.endswith("b"):
        return base + ("1" if digits[-1] == "0" else "0").rjust(len(digits), "0")
    return base + str(int(digits) + 1)


MUTATIONS = {
    "operator": ("|".join(map(re.escape, SWAPS)), lambda match: SWAPS[match[0]]),
    "edge": (r"\b(posedge|negedge)\b",
             lambda match: "negedge" if match[1] == "posedge" else "posedge"),
    "constant": (r"(\d+'[bd]|(?<![\w'\[:$#.]))(\d+)(?![\w':\]])", _number_changed),
    "condition": (r"\bif\s*\(([^()]+)\)", lambda match: f"if (!({match[1]}))"),
    "branch": (r"\?\s*([\w']+)\s*:\s*([\w']+)|\belse\b",
               lambda match: f"? {match[2]} : {match[1]}" if match[1] else "else if (0)"),
    "range": (r"\[(\d+)(:\d+)?\]",
              lambda match: f"[{max(0, int(match[1]) - 1)}{match[2] or ''}]"),
}


def mutated(text: str, generator: random.Random) -> tuple[str, str]:
    """(kind of mutation, the text with one); ("none", text) where nothing can be changed."""
    kinds = list(MUTATIONS)
    generator.shuffle(kinds)
    for kind in kinds:
        changed = _swapped(*MUTATIONS[kind], text, generator)
        if changed:
            return kind, changed
    return "none", text


# ---- Wrappers and testbenches ----

def wrapped(found: generate.Facts, inner: str, clock: str, inputs: str, outputs: str) -> str:
    """`inner` (a text with a module RefModule) inside of a TopModule of the named styles."""
    lines, ports = [], []
    for width, name in found.inputs:
        if name == "clk":
            lines.append(CLOCKS[clock])
            ports.append(".clk(clk_c)")
        else:
            lines.append(INPUTS[inputs].format(w=generate.bits(width), i=name, o=f"in_{name}"))
            ports.append(f".{name}(in_{name})")
    for width, name in found.outputs:
        lines.append(f"wire {generate.bits(width)}out_{name};")
        ports.append(f".{name}(out_{name})")
    lines.append(f"Inner inner({', '.join(ports)});")
    for _, name in found.outputs:
        lines.append(OUTPUTS[outputs].format(i=f"out_{name}", o=name))
    kind = "reg" if "always" in OUTPUTS[outputs] else "wire"
    return "\n".join([inner.replace("RefModule", "Inner"), generate.header(found, kind), *lines,
                      "endmodule", ""])


def blocking(problem: exams.Problem) -> exams.Problem:
    """The problem with a testbench that assigns its inputs at once, where it waited for an edge."""
    stimulus, rest = problem.testbench.split("endmodule", 1)
    changed = re.sub(r"(\w|\]|\})\s*<=(?!=)", r"\1 =", stimulus)
    return dataclasses.replace(problem, testbench=f"{changed}endmodule{rest}")


def candidates(problem: exams.Problem, each: int) -> Iterator[Candidate]:
    """`each` candidates for one problem, always the same; a third of them without a mutation."""
    generator = random.Random(problem.name)
    found = generate.facts(problem)
    styles = list(itertools.product(CLOCKS, OUTPUTS))
    generator.shuffle(styles)
    clocked = any(name == "clk" for _, name in found.inputs)
    for place in range(each):
        clock, outputs = styles[place]
        if not clocked:
            clock = "none"
        if place % 5 == 0:
            outputs = "as it is"
        inputs = generator.choice(list(INPUTS)) if place % 4 == 1 else "as it is"
        kind, inner = "none", problem.reference
        if place % 3:
            kind, inner = mutated(inner, generator)
        bench = "blocking" if place % 2 else "as it is"
        asked = blocking(problem) if place % 2 else problem
        if "clk" in outputs and not clocked:
            outputs = "as it is"
        yield Candidate(asked, bench, kind, clock, inputs, outputs,
                        wrapped(found, inner, clock, inputs, outputs))


# ---- The judge against one program ----

Outcome = tuple[str, int | None]  # category, mismatches


def together(problem: exams.Problem, code: str, limits: sandbox.Limits) -> Outcome:
    """verilog-eval's own way, all in one program: (category, mismatches or None)."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in (("top", code), ("test", problem.testbench), ("ref", problem.reference)):
            (folder / f"{name}.sv").write_text(text, errors="replace")
        command = [*judging.COMPILER, "-s", "tb", "-o", "program", "top.sv", "test.sv", "ref.sv"]
        log, _, ended = sandbox.run_limited(command, folder, limits)
        if (folder / "program").exists() and not ended:
            command = ["vvp", "-n", "program", "-none"]
            printed, _, ended = sandbox.run_limited(command, folder, limits)
            log += printed
    letter, _, count = judging.analyze(log)
    if ended:
        letter = {"time": "T", "output": "R"}[ended]
    category = {".": "pass", "S": "syntax", "T": "timeout"}.get(letter, "compile")
    if letter == "R":
        category = "mismatch" if count else "runtime"
    return category, count[0] if count else None


def compared(candidate: Candidate) -> tuple[Outcome, Outcome] | None:
    """(one program's verdict, the judge's); None where the testbench itself doesn't work."""
    limits = sandbox.Limits(seconds=10)
    try:
        verdict = judging.judge(candidate.problem, candidate.code, limits)
    except UserError:
        return None
    ours = (verdict.category, verdict.mismatches)
    return together(candidate.problem, candidate.code, limits), ours


def shipped() -> list[exams.Problem]:
    """The problems of this repository."""
    return [*exams.load_problems(ROOT / "data" / "tiny_eval"),
            *exams.load_problems(ROOT / "tests" / "fixtures" / "verilog_eval")]


def everything(checkout: str, each: int) -> list[Candidate]:
    """The candidates for verilog-eval's problems that Icarus can compile, and the 38 tiny ones."""
    problems = [*exams.load_problems(ROOT / "data" / "tiny_eval"),
                *exams.load_problems(Path(checkout) / "dataset_spec-to-rtl")]
    found = []
    for problem in problems:
        try:
            found.extend(candidates(problem, each))
        except ValueError as error:
            print("left out:", str(error).partition("\n")[0])
    return found


def measure(chosen: list[Candidate]) -> list[tuple[Candidate, Outcome, Outcome]]:
    """(candidate, one program's verdict, the judge's) for all that can be asked, with progress."""
    results, start = [], time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (candidate, pair) in enumerate(
                zip(chosen, pool.map(compared, chosen), strict=True), 1):
            if pair:
                results.append((candidate, *pair))
            if number % 200 == 0 or number == len(chosen):
                unlike = sum((one[0] == "pass") != (ours[0] == "pass") for _, one, ours in results)
                print(f"{number} of {len(chosen)}, {len(results)} asked, {unlike} unlike, "
                      f"{time.monotonic() - start:.0f} s", flush=True)
    return results


COLUMNS = ("what", "style", "answers", "passed_in_one_program", "pass_or_fail_equal",
           "category_equal", "mismatches_equal")


def table(results: list[tuple[Candidate, Outcome, Outcome]]) -> list[tuple]:
    """Rows of `COLUMNS`: all, then by testbench, mutation, clock, inputs and outputs."""
    groups = collections.defaultdict(list)
    for candidate, one, ours in results:
        groups["all", ""].append((one, ours))
        for what in ("bench", "mutation", "clock", "inputs", "outputs"):
            groups[what, getattr(candidate, what)].append((one, ours))
    rows = []
    for (what, style), pairs in groups.items():
        passed = sum(one[0] == "pass" for one, _ in pairs)
        alike = sum((one[0] == "pass") == (ours[0] == "pass") for one, ours in pairs)
        category = sum(one[0] == ours[0] for one, ours in pairs)
        both = sum(one == ours for one, ours in pairs)
        rows.append((what, style, len(pairs), passed, alike, category, both))
    order = ["all", "bench", "mutation", "clock", "inputs", "outputs"]
    return sorted(rows, key=lambda row: (order.index(row[0]), row[1]))


def main() -> None:
    """Measure, print what is unlike, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--each", type=int, default=17, help="answers to each problem")
    parser.add_argument("--every", type=int, default=1, help="take each n-th of them")
    parser.add_argument("--write", action="store_true", help="write mutants.csv")
    options = parser.parse_args()
    checkout = os.environ.get("VERILOG_EVAL_DIR") or sys.exit("Set VERILOG_EVAL_DIR.")
    results = measure(everything(checkout, options.each)[::options.every])
    for candidate, one, ours in results:
        if one != ours:
            print("unlike:", candidate.problem.name, candidate.bench, candidate.mutation,
                  candidate.clock, candidate.inputs, candidate.outputs, one, ours)
    rows = table(results)
    for row in rows:
        print(*row, sep=", ")
    if options.write:
        with RESULT.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
