"""Make the tiny world's data: `python -m appendix.world.make` writes data/tiny and data/tiny_eval.

`python -m appendix.world.make FOLDER 300` writes 300 training problems with testbenches instead,
none of them of the evaluation. Everything follows from the seeds below: the same bytes on any
machine.
`documents` yields the corpus that appendix/09_tiny_base.py pretrains on; it is not stored.
"""

import gzip
import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from appendix.world import bugs, families
from appendix.world.families import Design, Port, Random

DATA = Path(__file__).resolve().parent.parent.parent / "data"
CORPUS_SEED, ROWS_SEED, EVAL_SEED, DRAWS_SEED, BUGS_SEED = 1, 2, 3, 4, 5
BUG_SHARE = 0.4  # of the corpus' modules: code as it is
ROWS = 4_000
BROKEN = {"too long": 12, "no code": 10, "two fences": 14, "open answer": 6, "fence only": 6}
SYSTEM = ("You are a helpful assistant that writes Verilog. First think about the design inside "
          "<think> </think>, then give the module inside <answer> </answer>.")
MODULES = ("TopModule", "top", "unit", "core", "block", "my_module", "design1", "logic_unit",
           "cell1", "stage1", "part", "dut_module")


class Task(NamedTuple):
    """A problem, as verilog-eval asks it."""

    name: str
    design: Design
    prompt: str


# ── English ──

def interface(design: Design) -> str:
    """The ports as a list, one-bit ports without a width."""
    lines = []
    for port in design.ports:
        line = f" - {port.direction} {port.name}"
        if port.width > 1:
            line += f" ({port.width} bits)"
        lines.append(line)
    return "\n".join(lines)


PROMPTS = (
    "Implement a module named {name} with the following interface.\n\n{ports}\n\n{spec}",
    "I would like you to implement a module named {name} with the following interface. All ports "
    "are one bit unless otherwise specified.\n\n{ports}\n\n{spec}",
    "Write a Verilog module called {name}. Its ports are:\n\n{ports}\n\n{spec}",
    "Please design {name} in Verilog.\n\nInterface:\n{ports}\n\n{spec}",
    "{spec}\n\nThe module is named {name} and has these ports:\n\n{ports}",
)


def prompt(r: Random, design: Design) -> str:
    """Ask for the design, in one of five ways."""
    template = r.choice(PROMPTS)
    return template.format(name=design.module, ports=interface(design), spec=design.spec)


DOCUMENTS = {  # {template: how many of a hundred documents are of this form}
    "// {name}\n//\n{commented}\n//\n// {spec}\n\n{verilog}": 50,
    "// {spec}\n//\n// Ports of {name}:\n{commented}\n\n{verilog}": 22,
    "// {spec}\n{verilog}": 8,
    "{verilog}": 8,
    "{name}\n\nPorts:\n{ports}\n\n{spec}\n": 6,
    "{spec}\n\nThe ports of {name}:\n{ports}\n": 6,
}


def document(r: Random, design: Design) -> str:
    """One document of the corpus: commented Verilog, bare Verilog, or a specification only."""
    ports = interface(design)
    commented = "\n".join(f"// {line}" for line in ports.split("\n"))
    template, = r.choices(list(DOCUMENTS), weights=list(DOCUMENTS.values()))
    return template.format(name=design.module, ports=ports, commented=commented, spec=design.spec,
                           verilog=design.verilog())


# ── The three parts of the world ──

def designs(seed: int, names: Sequence[str]) -> Iterator[tuple[Random, Design]]:
    """An endless stream of designs, none of them held out for the evaluation.

    With each comes the generator that drew it, for whoever draws more about it.
    """
    r = random.Random(seed)
    while True:
        design = families.draw(r)
        if not design.held_out:
            yield r, design.renamed(r.choice(names))


def buggy(share: float, seed: int) -> Iterator[bool]:
    """An endless stream of decisions whether the next module gets a bug."""
    r = random.Random(seed)
    while True:
        yield r.random() < share


def documents(count: int, seed: int = CORPUS_SEED, bug_share: float = BUG_SHARE) -> Iterator[str]:
    """Yield `count` documents of the pretraining corpus; a share of the modules has a bug.

    Which specifications and names are drawn doesn't depend on `bug_share`: the corpus without bugs
    is the same one, corrected.
    """
    r_bugs = random.Random(BUGS_SEED + seed)
    stream = zip(designs(seed, MODULES), buggy(bug_share, seed), strict=False)
    for (r, design), is_wrong in itertools.islice(stream, count):
        if is_wrong:
            design = bugs.bug(r_bugs, design)
        yield document(r, design)


FENCE = "```verilog\n{code}```"
RESPONSES = {  # {form: what stands behind the thought}
    "no code": "<answer>\nThis cannot be implemented without the widths of all ports.\n</answer>",
    "two fences": f"<answer>\n{FENCE}\n\nIt can be used like this:\n\n"
                  "```verilog\nTopModule instance1 (.*);\n```\n</answer>",
    "open answer": f"<answer>\n{FENCE}\n",
    "fence only": FENCE,
}
WHOLE = f"<answer>\n{FENCE}\n</answer>"


def row(text: str, code: str, thought: str, form: str = "plain") -> dict[str, str]:
    """One training row in CodeV-R1's schema; `form` breaks it in one of the ways of `BROKEN`."""
    answer = RESPONSES.get(form, WHOLE).format(code=code)
    response = f"<think>\n{thought}\n</think>\n\n{answer}"
    return {"system": SYSTEM, "prompt": text, "response": response}


def shuffled_forms(count: int, seed: int) -> list[str]:
    """The form of each of `count` rows: the broken ones of `BROKEN` among plain ones."""
    forms: list[str] = []
    for form, number in BROKEN.items():
        forms += [form] * number
    forms += ["plain"] * (count - len(forms))
    random.Random(seed).shuffle(forms)
    return forms


def rows(count: int = ROWS, seed: int = ROWS_SEED, bug_share: float = 0.0
         ) -> Iterator[tuple[Design, dict[str, str], str]]:
    """Yield `(design, row, form)` of the training set, the broken ones spread through it.

    The stored rows are curated: their modules are right. With a `bug_share`, that share of them has
    a bug, as in a training set that a language model wrote and nobody has checked. The requests are
    the same ones.
    """
    stream = designs(seed, ("TopModule",) * 8 + MODULES)
    decisions = buggy(bug_share, seed)
    r_bugs = random.Random(BUGS_SEED + seed)
    for form in shuffled_forms(count, seed):
        r, design = next(stream)
        is_wrong = next(decisions)
        if form == "too long":
            design = families.table(r)
        thought = f"The module {design.module} has {len(design.ports)} ports. {design.thought}"
        asked = prompt(r, design)
        if is_wrong:
            design = bugs.bug(r_bugs, design)
        yield design, row(asked, design.verilog(), thought, form), form


def request(design: Design) -> str:
    """The prompt of a problem: the wording of verilog-eval."""
    return ("I would like you to implement a module named TopModule with the following interface. "
            "All ports are one bit unless otherwise specified.\n\n"
            f"{interface(design)}\n\n{design.spec}\n")


def problems(seed: int = EVAL_SEED) -> Iterator[Task]:
    """Yield one held-out design for every family."""
    r = random.Random(seed)
    for number, family in enumerate(families.FAMILIES, 1):
        design = families.draw(r, (family,))
        while not design.held_out:
            design = families.draw(r, (family,))
        yield Task(f"Prob{number:03d}_{design.family}", design, request(design))


def draws(count: int, seed: int = DRAWS_SEED) -> Iterator[Task]:
    """Yield `count` training problems, all different, none held out.

    No prompt equals one of the evaluation, and neither does a combination of family, widths and
    port names.
    """
    taken = {_plain(task.prompt) for task in problems()}
    number = 0
    for _, design in designs(seed, ("TopModule",)):
        if number == count:
            return
        text = request(design)
        if _plain(text) not in taken:
            taken.add(_plain(text))
            number += 1
            yield Task(f"Draw{number:04d}_{design.family}", design, text)


def _plain(text: str) -> str:
    """A prompt without what doesn't tell it from another: capitals and white space."""
    return " ".join(text.lower().split())


# ── Testbenches ──

TESTBENCH = """`timescale 1 ps/1 ps

module stimulus_gen (
  input clk{outputs}
);
  integer pattern, common;
  initial begin
{start}
    repeat (400) @(posedge clk, negedge clk) begin
      pattern = $urandom % 4;
      common = $urandom;
{drive}
    end
    #1 $finish;
  end
endmodule

module tb();
  typedef struct packed {{
    int errors;
    int errortime;
    int clocks;
  }} stats;
  stats stats1;

  reg clk = 0;
  initial forever #5 clk = ~clk;

{wires}
  wire tb_match;
  wire tb_mismatch = ~tb_match;

  initial begin
    $dumpfile("wave.vcd");
    $dumpvars(1, clk, tb_mismatch{dumped});
  end

  stimulus_gen stim1 (.clk{stimulated});
  RefModule good1 ({reference});
  TopModule top_module1 ({candidate});

  // An unknown bit of the reference matches anything; one of the candidate matches only an unknown.
  assign tb_match = ({{{refs}}} === ({{{refs}}} ^ {{{duts}}} ^ {{{refs}}}));

  // An explicit list: the module under test must have settled before it is compared.
  always @(posedge clk, negedge clk) begin
    stats1.clocks++;
    if (!tb_match) begin
      if (stats1.errors == 0) stats1.errortime = $time;
      stats1.errors++;
    end
  end

  final begin
    if (stats1.errors) $display("Hint: First mismatch occurred at time %0d.", stats1.errortime);
    $display("Simulation finished at %0d ps", $time);
    $display("Mismatches: %1d in %1d samples", stats1.errors, stats1.clocks);
  end

  initial begin
    #1000000
    $display("TIMEOUT");
    $finish();
  end
endmodule
"""


def kind(design: Design, port: Port) -> str:
    """What the stimulus does with an input: "clock", reset (active "high" or "low"), or "data"."""
    if port.name in families.CLOCKS and design.clocked:
        return "clock"
    if port.name in families.LOW_RESETS:
        return "low"
    if port.name in (*families.RESETS, *families.ASYNC_RESETS) and design.clocked:
        return "high"
    return "data"


class Sides(NamedTuple):
    """The ports of a design, by what a testbench does with them."""

    clocks: list[Port]
    driven: list[Port]  # all other inputs
    outputs: list[Port]


def sides_of(design: Design) -> Sides:
    """The `Sides` of a design, each in the order of its header."""
    sides = Sides([], [], [])
    for port in design.ports:
        if kind(design, port) == "clock":
            sides.clocks.append(port)
        elif port.direction == "input":
            sides.driven.append(port)
        else:
            sides.outputs.append(port)
    return sides


DATA_DRIVEN = "pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom"
DRIVEN = {"high": "$urandom % 12 == 0", "low": "$urandom % 12 != 0", "data": DATA_DRIVEN}


def stimulus(design: Design, driven: Sequence[Port]) -> dict[str, str]:
    """What `TESTBENCH` says about the inputs: their declarations, first values, and values."""
    declared, start, values = [], [], []
    has_reset = False
    for port in driven:
        role = kind(design, port)
        has_reset = has_reset or role in ("high", "low")
        first = 1 if role == "high" else 0
        declared.append(f",\n  output reg {port.vector}{port.name}")
        start.append(f"    {port.name} <= {first};")
        values.append(f"      {port.name} <= {DRIVEN[role]};")
    if has_reset:
        start.append("    repeat (3) @(negedge clk);")
    return {"outputs": "".join(declared), "start": "\n".join(start), "drive": "\n".join(values)}


def testbench(design: Design) -> str:
    """A testbench in verilog-eval's form: RefModule and TopModule side by side, any input order."""
    sides = sides_of(design)
    wires = [f"  wire {port.vector}{port.name};" for port in sides.driven]
    references: list[str] = []  # outputs of RefModule
    candidates: list[str] = []  # and of TopModule
    for port in sides.outputs:
        references.append(f"{port.name}_ref")
        candidates.append(f"{port.name}_dut")
        wires.append(f"  wire {port.vector}{references[-1]};")
        wires.append(f"  wire {port.vector}{candidates[-1]};")
    refs, duts = ", ".join(references), ", ".join(candidates)
    inputs = [port.name for port in sides.driven]

    return TESTBENCH.format(
        **stimulus(design, sides.driven),
        wires="\n".join(wires) + "\n",
        dumped="".join(f", {name}" for name in inputs) + f", {refs}, {duts}",
        stimulated="".join(f", .{name}" for name in inputs),
        reference=_connections(sides, references),
        candidate=_connections(sides, candidates),
        refs=refs, duts=duts)


def _connections(sides: Sides, outputs: Sequence[str]) -> str:
    """The ports of a module under test, joined to the testbench; `outputs` are its wires there."""
    joined = [f".{port.name}(clk)" for port in sides.clocks]
    joined += [f".{port.name}" for port in sides.driven]
    for port, name in zip(sides.outputs, outputs, strict=True):
        joined.append(f".{port.name}({name})")
    return ", ".join(joined)


def checks(design: Design, steps: int = 40, seed: int = 0) -> str:
    """A second, independent judge: a testbench whose expected values come from the Python model.

    It prints `PASS` or the first difference. Inputs change at the falling edge; outputs are
    compared just before the rising edge (asynchronous resets have acted) and just after it.
    """
    r = random.Random(seed)
    sides = sides_of(design)
    lines = ["module tb;", "reg clk_ = 0;"]
    for port in sides.driven:
        lines.append(f"reg [{port.width - 1}:0] {port.name};")
    for port in sides.outputs:
        lines.append(f"wire [{port.width - 1}:0] {port.name};")
    connections = []
    for port in design.ports:
        wire = "clk_" if port in sides.clocks else port.name
        connections.append(f".{port.name}({wire})")
    lines += [f"{design.module} dut ({', '.join(connections)});", "initial begin"]

    state = None
    for step in range(steps):
        values = _drawn_inputs(r, design, sides.driven, step)
        for port in sides.driven:
            lines.append(f"{port.name} = {port.width}'d{values[port.name]};")
        for is_rising in (False, True):
            if is_rising and design.clocked:
                state = design.clocked(state, values)
                lines.append("clk_ = 1;")
            if design.at_once:
                state = design.at_once(state, values)
            lines.append("#1;")
            is_known = state is not None or not design.clocked
            if is_known:
                lines += _comparisons(design.output(state, values), step)
        lines.append("clk_ = 0; #1;")
    return "\n".join([*lines, '$display("PASS");', "$finish;", "end", "endmodule", ""])


def _drawn_inputs(r: Random, design: Design, driven: Sequence[Port], step: int) -> dict[str, int]:
    """The values of the inputs in a step; resets are active in the first two and now and then."""
    common = r.getrandbits(32)
    pattern = r.randrange(4)
    values = {}
    for port in driven:
        is_active = step < 2 or r.random() < 0.1
        if pattern == 0:
            word = common
        elif pattern == 1:
            word = r.getrandbits(2)
        else:
            word = r.getrandbits(32)
        by_kind = {"high": int(is_active), "low": int(not is_active),
                   "data": word & families.mask(port.width)}
        values[port.name] = by_kind[kind(design, port)]
    return values


def _comparisons(outputs: families.Values, step: int) -> list[str]:
    """Lines that end the simulation where an output isn't what the model says."""
    lines = []
    for name, value in outputs.items():
        if value is not None:
            lines.append(f'if ({name} !== {value}) begin $display("{name} is %0d at step {step}, '
                         f'not {value}", {name}); $finish; end')
    return lines


# ── Files ──

def write_problems(folder: Path, tasks: Iterable[Task]) -> None:
    """Write prompt, reference and testbench of every problem, as verilog-eval does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, design, text in tasks:
        files = {"prompt.txt": text, "ref.sv": design.verilog("RefModule"),
                 "test.sv": testbench(design)}
        for suffix, content in files.items():
            (folder / f"{name}_{suffix}").write_bytes(content.encode())


def write(folder: Path = DATA) -> None:
    """Write data/tiny/train.jsonl.gz and data/tiny_eval/ under `folder`."""
    tiny = folder / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    lines = []
    for _, entry, _ in rows():
        lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
    with open(tiny / "train.jsonl.gz", "wb") as raw, \
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write("".join(lines).encode())

    evaluation = folder / "tiny_eval"
    shutil.rmtree(evaluation, ignore_errors=True)
    write_problems(evaluation, problems())


def main(words: list[str]) -> None:
    """Write the data, or a folder of training problems if it and their number are given."""
    if len(words) == 2:
        folder, count = words
        write_problems(Path(folder), draws(int(count)))
        print(f"wrote {count} problems to {folder}")
        return
    write()
    print(f"wrote {DATA / 'tiny'} and {DATA / 'tiny_eval'}")


if __name__ == "__main__":
    main(sys.argv[1:])
