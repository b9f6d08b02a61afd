"""Make the tiny world's data: `python -m appendix.world.make` writes data/tiny and data/tiny_eval.

`python -m appendix.world.make FOLDER 300` writes 300 training problems with testbenches instead, none
of them of the evaluation. Everything follows from the seeds below: the same bytes on any machine.
`documents` yields the corpus that appendix/09_tiny_base.py pretrains on; it is not stored.
"""

import gzip
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from appendix.world import bugs, families

DATA = Path(__file__).resolve().parent.parent.parent / "data"
CORPUS_SEED, ROWS_SEED, EVAL_SEED, DRAWS_SEED, BUGS_SEED = 1, 2, 3, 4, 5
BUG_SHARE = 0.4  # of the corpus' modules: code as it is
ROWS = 4_000
BROKEN = {"too long": 12, "no code": 10, "two fences": 14, "open answer": 6, "fence only": 6}
SYSTEM = ("You are a helpful assistant that writes Verilog. First think about the design inside "
          "<think> </think>, then give the module inside <answer> </answer>.")
MODULES = ("TopModule", "top", "unit", "core", "block", "my_module", "design1", "logic_unit", "cell1",
           "stage1", "part", "dut_module")


# ── English ──

def interface(design):
    """The ports as a list, one-bit ports without a width."""
    return "\n".join(f" - {port.direction} {port.name}" + (f" ({port.width} bits)" if port.width > 1 else "")
                     for port in design.ports)


def prompt(r, design):
    """Ask for the design, in one of five ways."""
    ports, spec, name = interface(design), design.spec, design.module
    return r.choice((
        f"Implement a module named {name} with the following interface.\n\n{ports}\n\n{spec}",
        f"I would like you to implement a module named {name} with the following interface. All ports "
        f"are one bit unless otherwise specified.\n\n{ports}\n\n{spec}",
        f"Write a Verilog module called {name}. Its ports are:\n\n{ports}\n\n{spec}",
        f"Please design {name} in Verilog.\n\nInterface:\n{ports}\n\n{spec}",
        f"{spec}\n\nThe module is named {name} and has these ports:\n\n{ports}",
    ))


def document(r, design):
    """One document of the corpus: commented Verilog, bare Verilog, or a specification without code."""
    ports, spec, name, verilog = interface(design), design.spec, design.module, design.verilog()
    listed = "\n".join(f"// {line}" for line in ports.split("\n"))
    return r.choices((
        f"// {name}\n//\n{listed}\n//\n// {spec}\n\n{verilog}",
        f"// {spec}\n//\n// Ports of {name}:\n{listed}\n\n{verilog}",
        f"// {spec}\n{verilog}",
        verilog,
        f"{name}\n\nPorts:\n{ports}\n\n{spec}\n",
        f"{spec}\n\nThe ports of {name}:\n{ports}\n",
    ), weights=(50, 22, 8, 8, 6, 6))[0]


# ── The three parts of the world ──

def designs(seed, names):
    """An endless stream of designs, none of them held out for the evaluation."""
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
    for (r, design), wrong, _ in zip(designs(seed, MODULES), buggy(bug_share, seed), range(count)):
        yield document(r, bugs.bug(r_bugs, design) if wrong else design)


def row(text, code, thought, form="plain"):
    """One training row in CodeV-R1's schema; `form` breaks it in one of the ways of `BROKEN`."""
    think = f"<think>\n{thought}\n</think>\n\n"
    fence = f"```verilog\n{code}```"
    response = {
        "no code": f"{think}<answer>\nThis cannot be implemented without the widths of all ports.\n</answer>",
        "two fences": f"{think}<answer>\n{fence}\n\nIt can be used like this:\n\n"
                      "```verilog\nTopModule instance1 (.*);\n```\n</answer>",
        "open answer": f"{think}<answer>\n{fence}\n",
        "fence only": f"{think}{fence}",
    }.get(form, f"{think}<answer>\n{fence}\n</answer>")
    return {"system": SYSTEM, "prompt": text, "response": response}


def rows(count: int = ROWS, seed: int = ROWS_SEED, bug_share: float = 0.0
         ) -> Iterator[tuple[families.Design, dict[str, str], str]]:
    """Yield `(design, row, form)` of the training set, the broken ones spread through it.

    The stored rows are curated: their modules are right. With a `bug_share`, that share of them has
    a bug, as in a training set that a language model wrote and nobody has checked. The requests are
    the same ones.
    """
    forms = [form for form, number in BROKEN.items() for _ in range(number)]
    forms += ["plain"] * (count - len(forms))
    random.Random(seed).shuffle(forms)
    stream = designs(seed, ("TopModule",) * 8 + MODULES)
    r_bugs = random.Random(BUGS_SEED + seed)
    for form, wrong in zip(forms, buggy(bug_share, seed)):
        r, design = next(stream)
        if form == "too long":
            design = families.table(r)
        thought = f"The module {design.module} has {len(design.ports)} ports. {design.thought}"
        asked = prompt(r, design)
        answered = bugs.bug(r_bugs, design) if wrong else design
        yield answered, row(asked, answered.verilog(), thought, form), form


def request(design):
    """The prompt of a problem: the wording of verilog-eval."""
    return (f"I would like you to implement a module named TopModule with the following interface. All "
            f"ports are one bit unless otherwise specified.\n\n{interface(design)}\n\n{design.spec}\n")


def problems(seed=EVAL_SEED):
    """Yield `(name, design, prompt)`: one held-out design for every family."""
    r = random.Random(seed)
    for number, family in enumerate(families.FAMILIES, 1):
        design = families.draw(r, (family,))
        while not design.held_out:
            design = families.draw(r, (family,))
        yield f"Prob{number:03d}_{design.family}", design, request(design)


def draws(count, seed=DRAWS_SEED):
    """Yield `(name, design, prompt)` of `count` training problems, all different, none held out.

    No prompt equals one of the evaluation, and no combination of family, widths and port names does.
    """
    taken = {" ".join(text.lower().split()) for _, _, text in problems()}
    stream, number = designs(seed, ("TopModule",)), 0
    while number < count:
        _, design = next(stream)
        text = request(design)
        plain = " ".join(text.lower().split())
        if plain not in taken:
            taken.add(plain)
            number += 1
            yield f"Draw{number:04d}_{design.family}", design, text


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


def kind(design, port):
    """What the stimulus does with an input: clock, reset (active high or low), or data."""
    if port.name in families.CLOCKS and design.clocked:
        return "clock"
    if port.name in families.LOW_RESETS:
        return "low"
    high = port.name in (*families.RESETS, *families.ASYNC_RESETS) and design.clocked
    return "high" if high else "data"


def testbench(design):
    """A testbench in verilog-eval's form: RefModule and TopModule side by side, any input order."""
    inputs = [port for port in design.ports if port.direction == "input" and kind(design, port) != "clock"]
    outputs = [port for port in design.ports if port.direction == "output"]
    clock = [port for port in design.ports if kind(design, port) == "clock"]

    def vector(port):
        return f"[{port.width - 1}:0] " if port.width > 1 else ""

    def drive(port):
        active = {"high": "$urandom % 12 == 0", "low": "$urandom % 12 != 0"}.get(kind(design, port))
        return f"      {port.name} <= {active or 'pattern == 0 ? common : pattern == 1 ? $urandom % 4 : $urandom'};"

    def connect(suffix):
        first = [f".{port.name}(clk)" for port in clock] + [f".{port.name}" for port in inputs]
        return ", ".join(first + [f".{port.name}({port.name}_{suffix})" for port in outputs])

    start = [f"    {port.name} <= {int(kind(design, port) == 'high')};" for port in inputs]
    if any(kind(design, port) in ("high", "low") for port in inputs):
        start.append("    repeat (3) @(negedge clk);")
    refs, duts = (", ".join(f"{port.name}_{suffix}" for port in outputs) for suffix in ("ref", "dut"))
    return TESTBENCH.format(
        outputs="".join(f",\n  output reg {vector(port)}{port.name}" for port in inputs),
        start="\n".join(start), drive="\n".join(map(drive, inputs)),
        wires="\n".join([f"  wire {vector(port)}{port.name};" for port in inputs]
                        + [f"  wire {vector(port)}{port.name}_{suffix};" for port in outputs
                           for suffix in ("ref", "dut")]) + "\n",
        dumped="".join(f", {port.name}" for port in inputs) + f", {refs}, {duts}",
        stimulated="".join(f", .{port.name}" for port in inputs),
        reference=connect("ref"), candidate=connect("dut"), refs=refs, duts=duts)


def checks(design, steps=40, seed=0):
    """A second, independent judge: a testbench whose expected values come from the Python model.

    It prints `PASS` or the first difference. Inputs change at the falling edge; outputs are compared
    just before the rising edge (asynchronous resets have acted) and just after it.
    """
    r = random.Random(seed)
    inputs = [port for port in design.ports if port.direction == "input" and kind(design, port) != "clock"]
    outputs = [port for port in design.ports if port.direction == "output"]
    names = [port.name for port in design.ports]
    lines, state = [], None
    for step in range(steps):
        common, pattern = r.getrandbits(32), r.randrange(4)
        values = {}
        for port in inputs:
            what = kind(design, port)
            active = step < 2 or r.random() < 0.1
            word = common if pattern == 0 else r.getrandbits(2) if pattern == 1 else r.getrandbits(32)
            values[port.name] = {"high": int(active), "low": int(not active)}.get(
                what, word & families.mask(port.width))
            lines.append(f"{port.name} = {port.width}'d{values[port.name]};")
        for edge in (False, True):
            if edge and design.clocked:
                state = design.clocked(state, values)
                lines.append("clk_ = 1;")
            if design.at_once:
                state = design.at_once(state, values)
            lines.append("#1;")
            if not design.clocked or state is not None:
                for name, value in design.output(state, values).items():
                    if value is not None:
                        lines.append(f'if ({name} !== {value}) begin $display("{name} is %0d at step {step}, '
                                     f'not {value}", {name}); $finish; end')
        lines.append("clk_ = 0; #1;")
    declared = [f"{'reg' if port in inputs else 'wire'} [{port.width - 1}:0] {port.name};"
                for port in (*inputs, *outputs)]
    connections = ", ".join(f".{name}({'clk_' if kind(design, port) == 'clock' else name})"
                            for name, port in zip(names, design.ports, strict=True))
    return "\n".join(["module tb;", "reg clk_ = 0;", *declared, f"{design.module} dut ({connections});",
                      "initial begin", *lines, '$display("PASS");', "$finish;", "end", "endmodule", ""])


# ── Files ──

def write_problems(folder, items):
    """Write prompt, reference and testbench of every `(name, design, prompt)`, as verilog-eval does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, design, text in items:
        for suffix, content in (("prompt.txt", text), ("ref.sv", design.verilog("RefModule")),
                                ("test.sv", testbench(design))):
            (folder / f"{name}_{suffix}").write_bytes(content.encode())


def write(folder=DATA):
    """Write data/tiny/train.jsonl.gz and data/tiny_eval/ under `folder`."""
    tiny, evaluation = folder / "tiny", folder / "tiny_eval"
    tiny.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for _, entry, _ in rows())
    with open(tiny / "train.jsonl.gz", "wb") as raw, \
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write(text.encode())
    shutil.rmtree(evaluation, ignore_errors=True)
    write_problems(evaluation, problems())


if __name__ == "__main__" and len(sys.argv) == 3:
    write_problems(Path(sys.argv[1]), draws(int(sys.argv[2])))
    print(f"wrote {sys.argv[2]} problems to {sys.argv[1]}")
elif __name__ == "__main__":
    write()
    print(f"wrote {DATA / 'tiny'} and {DATA / 'tiny_eval'}")
