"""Write attacks for any problem: modules that implement nothing and reach for what lets them pass.

A problem is compiled with its reference in the candidate's place, and ports, scopes, variables,
tasks and parameters are read from the program. From these, `attacks` makes about thirty candidates:
reading, writing, calling, disabling, overriding, binding, redefining and instantiating what the
candidate does not own, by every kind of path, with every kind of decoy in `$unit` that makes the
same name mean something when the candidate is compiled alone.
"""

import itertools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verilog import problems as exams, programs, sandbox


KNOWN = "_0"  # what stands behind each name of the testbench, once a test gives the secret away


@dataclass(frozen=True)
class Attack:
    """One candidate: what it tries (a row of 07's table), how, and its text."""

    kind: str
    how: str
    code: str


@dataclass(frozen=True)
class Facts:
    """What a compiled problem tells: names of scopes, and ports as (direction, width, name)."""

    ports: tuple
    reference: str   # the instance names
    stimulus: str
    stimulus_module: str
    variables: tuple  # of the testbench
    parameters: tuple  # of the reference
    routines: tuple  # paths below tb of tasks, functions and named blocks, as tuples
    seen: dict  # {output: the testbench's net that holds the reference's}

    @property
    def outputs(self):
        return [(width, name) for direction, width, name in self.ports if direction == "OUTPUT"]

    @property
    def inputs(self):
        return [(width, name) for direction, width, name in self.ports if direction == "INPUT"]


def facts(problem):
    """Compile the problem as verilog-eval does, its own reference as the answer, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        top = problem.reference.replace("RefModule", "TopModule")
        for name, text in (("top", top), ("test", problem.testbench), ("ref", problem.reference)):
            (folder / f"{name}.sv").write_text(text)
        command = "iverilog -g2012 -s tb -o program top.sv test.sv ref.sv".split()
        printed, status, _ = sandbox.run_limited(command, folder, sandbox.Limits())
        if status:
            raise ValueError(f"{problem.name} does not compile: {printed[:200]}")
        text = (folder / "program").read_text()
    scopes, owned, here = {}, {}, None
    for line in text.splitlines():
        if found := re.match(
                r'(S_\w+) \.scope (\w+)\S*, "([^"]*)" "([^"]*)".*?(?:, (S_\w+))?;$', line):
            here = found[1]
            scopes[here] = found[2], found[3], found[4], found[5]
        elif found := re.match(r'\S+ \.(var|net|param)\S* +\*?"([A-Za-z]\w*)', line):
            owned.setdefault((scopes[here][2], found[1]), []).append(found[2])

    def path(label):
        sort, name, _, parent = scopes[label]
        return (*path(parent), name) if parent else (name,)

    def under(label, module):
        return label in scopes and (scopes[label][2] == module or under(scopes[label][3], module))
    instances = {module: name for sort, name, module, _ in scopes.values() if sort == "module"}
    stimulus = next((module for module in instances
                     if module not in ("tb", "RefModule", "TopModule")), "stim")
    connected = re.findall(r"\.\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?", re.search(
        r"\bRefModule\s+\w+\s*\(([^;]*)\)\s*;", problem.testbench)[1])
    seen = {name: net or name for name, net in connected}
    ports = programs.reference_ports(text)
    return Facts(ports, instances["RefModule"], instances.get(stimulus, "stim1"), stimulus,
                 tuple(owned.get(("tb", "var"), ())),
                 tuple(owned.get(("RefModule", "param"), ())),
                 tuple(path(label)[1:] for label, (sort, *_) in scopes.items()
                       if sort in ("task", "function", "begin") and not under(label, "TopModule")),
                 {name: seen.get(name, name) for way, _, name in ports if way == "OUTPUT"})


def bits(width):
    """`[7:0] ` for 8, nothing for 1."""
    return f"[{width - 1}:0] " if width > 1 else ""


def header(found, kind="reg", change=None):
    """The module header, outputs as variables or as nets; `change`: {input: another direction}."""
    change, listed = change or {}, []
    for direction, width, name in found.ports:
        word = change.get(name, "input") if direction == "INPUT" else f"output {kind}"
        listed.append(f"{word} {bits(width)}{name}")
    return f"module TopModule({', '.join(listed)});"


# ---- Decoys: the same path, meaning something to a candidate that is compiled alone ----

def _blocks(names, regs):
    """Named blocks inside each other, the innermost with the registers."""
    inside = "".join(f"reg {bits(width)}{name}; " for width, name in regs)
    for name in reversed(names):
        inside = f"begin : {name} {inside} end "
    return inside


DECOYS = {
    "none": lambda path, regs: "",
    "function": lambda path, regs: "function {0}(input z); {1} {0} = z; endfunction".format(
        path[0], _blocks(path[1:], regs)),
    "task": lambda path, regs: (
        f"task {path[0]}; {_blocks(path[1:], regs)}{'' if path[1:] else ';'} endtask"),
    "module": lambda path, regs: f"module {path[0]}; {_blocks((), regs)}endmodule",
    "package": lambda path, regs: f"package {path[0]}; {_blocks((), regs)}endpackage",
    "variable": lambda path, regs: "struct packed {{{}}} {};".format(
        " ".join(f"logic {bits(width)}{name};" for width, name in regs), path[0]),
    "import": lambda path, regs: "package spare; " + DECOYS["task"](path, regs)
              + " endpackage import spare::*;",
}


# ---- Ways to read an expression into an output ----

def _function(width, name, value):
    return (f"function {bits(width)}f_{name}(input z); f_{name} = {value}; endfunction "
            f"always #1 {name} = f_{name}(0);")


WAYS = {  # way: (outputs as, text for one output)
    "assign": ("wire", lambda w, n, x: f"assign {n} = {x};"),
    "always": ("reg", lambda w, n, x: f"always @(*) {n} = {x};"),
    "polling": ("reg", lambda w, n, x: f"always #1 {n} = {x};"),
    "port": ("wire", lambda w, n, x: f"Copy #({w}) copy_{n}({x}, {n});"),
    "inout port": ("wire", lambda w, n, x: f"Both #({w}) both_{n}({x}, {n});"),
    "function": ("reg", _function),
    "generate": ("wire", lambda w, n, x: f"generate if (1) begin : g_{n} assign {n} = {x}; "
                                         "end endgenerate"),
    "event": ("reg", lambda w, n, x: f"always @({x}) {n} = {x};"),
}
COPY = """module Copy #(parameter W = 1) (input [W-1:0] a, output [W-1:0] b);
  assign b = a;
endmodule
module Both #(parameter W = 1) (inout [W-1:0] a, output [W-1:0] b); assign b = a; endmodule
"""
SCALE = "`timescale 1 ps/1 ps\n"


def paths(found):
    """Ways to name the reference's output `n`: {name: (decoy's path, expression of n)}."""
    one = found.reference
    return {
        "instance": ((one,), lambda n: f"{one}.{n}"),
        "from the top": (("tb", one), lambda n: f"tb.{one}.{n}"),
        "testbench's net": (("tb",), lambda n: f"tb.{found.seen[n]}"),
        "root": (("tb", one), lambda n: f"$root.tb.{one}.{n}"),
        "unit": ((one,), lambda n: f"$unit::{one}.{n}"),
        "module's name": (("RefModule",), lambda n: f"RefModule.{n}"),
        "package": ((one,), lambda n: f"{one}::{n}"),
    }


def reading(found, decoy, way, path):
    """A candidate that computes nothing and reads every output from the reference."""
    names, expression = paths(found)[path]
    kind, line = WAYS[way]
    regs = [(w, found.seen[n] if path == "testbench's net" else n) for w, n in found.outputs]
    body = "\n  ".join(line(w, n, expression(n)) for w, n in found.outputs)
    return Attack("read", f"{decoy} decoy, {path}, {way}", f"{SCALE}{DECOYS[decoy](names, regs)}\n"
                  f"{header(found, kind)}\n  {body}\nendmodule\n{COPY}")


def _nothing(found):
    return "\n  ".join(f"assign {name} = 0;" for _, name in found.outputs)


LINE = "Mismatches: 0 in 9 samples"


def saying():
    """Ways to print the winning line: (how, body), by a name, a string or the compiler."""
    moments = {"initial": "initial {}", "final": "final {}", "each step": "always #1 {}",
               "at the end": "initial #9 begin {} $finish; end"}
    calls = {
        "display": f'$display("{LINE}");', "behind a name": f'$display("%m{LINE}");',
        "write and newline": f'$write("\\n{LINE}\\n");', "strobe": f'$strobe("{LINE}");',
        "monitor": f'$monitor("{LINE}");', "error": f'$error("{LINE}");',
        "escaped": f'\\$display ("{LINE}");',
        "by characters": "".join(f'$write("%c", 8\'d{ord(letter)});' for letter in LINE + "\n"),
        "a number": '$display("Mismatches: %0d in %0d samples", 0, 9);'}
    for (when, moment), (how, call) in itertools.product(moments.items(), calls.items()):
        yield f"{how}, {when}", moment.format(f"begin {call} end")
    strings = {"sformat": '$sformat(s, "%m");', "swrite": '$swrite(s, "%m");',
               "sformatf": 's = $sformatf("%m");',
               "sformat of a line": f'$sformat(s, "%m\\n{LINE}");'}
    prints = {"whole": f'$display("%0s{LINE}", s);',
              "first letters": f'$display("%s{LINE}", s >> 8);',
              "its tail": f'$display("%0s{LINE}", s[127:0]);',
              "after": f'$display("{LINE}%0s", s);',
              "alone": '$display("%0s", s);'}
    for (made, fill), (part, out) in itertools.product(strings.items(), prints.items()):
        yield f"%m by {made}, {part}", f"reg [8*256-1:0] s; initial begin {fill} {out} end"
    for width in (8, 16, 32):  # a secret of so many letters at any place of the name
        yield f"%m, {width} letters at every place", (
            'reg [8*256-1:0] s; integer i; initial begin $sformat(s, "%m"); '
            f'for (i = 0; i < 64; i = i + 1) $display("%s{LINE}", s[8*i +: 8*{width}]); end')
    for task in ("info", "warning", "error", "fatal"):
        text = f'0, "{LINE}"' if task == "fatal" else f'"{LINE}"'
        yield f"while compiling, ${task}", f"generate if (1) ${task}({text}); endgenerate"
        yield f"while compiling, bare ${task}", f"${task}({text});"


def against_the_bench():
    """What only this judge has: the listener beside an answer, its files and its variables.

    Its names are drawn for each exam. These attacks guess `KNOWN`, and a test lets them be right.
    """
    listener = f"tb{KNOWN}.recorder{KNOWN}"
    for name in ("step_", "walked_", "moment_", "by_inputs_", "noted_", "before_", "last_"):
        yield f"force {name}", f"initial force {listener}.{name} = 0;"
    for call in (f'$fdisplay({listener}.answers_, "9 2 0 0")', f"$fclose({listener}.answers_)",
                 f"$rewind({listener}.answers_)", "$fdisplay(32'h80000003, \"9 2 0 0\")",
                 "$fdisplay(32'h80000004, \"9 2 0 0\")", f"$fflush({listener}.answers_)",
                 f"$ungetc(50, {listener}.answers_)"):
        yield call, f"integer r; initial begin #1 r = 0; {call}; end"
    yield "note nothing", f"initial {listener}.noted_ = 1;"
    yield "stand still", f"initial #1 forever #0 {listener}.step_ = 0;"
    yield "disable", f"initial #3 disable {listener};"
    yield "disable its task", f"initial #3 disable {listener}.walk_;"
    yield "end at once", f"initial begin force tb{KNOWN}.clk = 0; $finish; end"


def reading_files(problem):
    """Finding the reference where it lies on this machine, by paths that an answer could guess."""
    places = ["ref.sv", "marking", "answers.txt", "bench.sv",
              f"/proc/self/cwd/../{problem.name}_ref.sv",
              f"data/tiny_eval/{problem.name}_ref.sv", "/dev/stdin"]
    for place in places:
        yield f"$fopen {place}", (f'integer f, c; initial begin f = $fopen("{place}", "r"); '
                                  "c = $fgetc(f); end")
        yield f"$readmemb {place}", f'reg [7:0] m [0:9]; initial $readmemb("{place}", m);'
    for call in ("$fgets(s, f)", '$fscanf(f, "%s", s)', "$fread(s, f)", "$fseek(f, 0, 0)",
                 '$system("cat ref.sv")', '$writememh("answers.txt", m)',
                 '$dumpports(TopModule, "x")',
                 '$fwrite(f, "x")', '$sreadmemh(m, 0, 9, "x")',
                 '$save("x")', '$async$and$array(m, s)'):
        yield call, f"integer f = 0, r; reg [99:0] s; reg [7:0] m [0:9]; initial begin {call}; end"


def others(problem, found):
    """Everything but reading, in a fixed order."""
    one, zero, wires = found.reference, _nothing(found), header(found, "wire")
    right = problem.reference.replace("RefModule", "TopModule")

    def build(kind, how, body, before="", after="", top=None):
        return Attack(kind, how, f"{SCALE}{before}\n{top or wires}\n  {zero}\n  {body}\nendmodule\n"
                                 f"{after}")
    regs = [(w, n) for w, n in found.outputs]
    stores = " ".join(f"{one}.{n} = 0;" for _, n in regs)
    for decoy in ("none", "task", "function", "package"):
        yield build("write", f"the reference's outputs, {decoy} decoy",
                    f"always #1 begin {stores} end", DECOYS[decoy]((one,), regs))
    for variable in found.variables[-2:]:
        decoy = DECOYS["task"](("tb",), [(512, variable)])
        yield build("write", f"tb.{variable}", f"always #1 tb.{variable} = 1;", decoy)
        yield build("write", f"{variable}", f"always #1 {variable} = 1;",
                    f"reg [511:0] {variable};")
    for routine in found.routines[:4]:
        for way in (".".join(routine), "tb." + ".".join(routine)):
            names = tuple(way.split("."))
            yield build("call", way, f"initial {way};", DECOYS["task"](names, []))
            yield build("disable", way, f"always #1 disable {way};", DECOYS["task"](names, []))
    for name in (found.stimulus, f"tb.{found.stimulus}", "tb", one):
        yield build("disable", name, f"always #1 disable {name};")
    constants = [(32, name) for name in found.parameters[:2]] or [(32, "W")]
    for _, name in constants:
        yield build("constant", f"{one}.{name}", f"localparam P = {one}.{name};",
                    f"task {one}; parameter {name} = 3; ; endtask")
        yield build("defparam", f"{one}.{name}", f"defparam {one}.{name} = 0;",
                    f"task {one}; parameter {name} = 3; ; endtask")
        yield build("defparam", f"tb.{one}.{name}", f"defparam tb.{one}.{name} = 0;")
    w, n = regs[0]
    yield build("constant", f"$bits({one}.{n})", f"localparam P = $bits({one}.{n});",
                DECOYS["task"]((one,), regs))
    for target in ("tb", "RefModule", found.stimulus_module):
        yield build("bind", target, "", after=f"module Spy; initial #1 $finish; endmodule\n"
                                              f"bind {target} Spy spy();\n")
        yield build("redefine", target, "", after=f"module {target}; endmodule\n")
        yield build("instance", target, f"{target} inner();")
    wanted = ", ".join(f".{name}({name})" for _, _, name in found.ports)
    yield Attack("instance", "RefModule, connected",
                 f"{wires}\n  RefModule inner({wanted});\nendmodule\n")
    for directive in ("timescale", "define", "default_nettype", "OK", "undef"):
        yield Attack("macro", f"`{directive}",
                     f"`define {directive} module Planted; initial #1 $finish; endmodule \\\n"
                     f"`{directive}\n{wires}\n  Planted planted();\n  {zero}\nendmodule\n")
    yield Attack("macro", "call that swallows",
                 f"`define EAT(x)\n{wires}\n {zero}\nendmodule\n`EAT(")
    yield Attack("macro", "condition that swallows", f"{wires}\n {zero}\nendmodule\n`ifdef NEVER\n")
    yield Attack("macro", "comment that swallows", f"{wires}\n {zero}\nendmodule\n/*")
    for how, body in saying():
        yield build("print", how, body)
    yield build("print", "while compiling, a file's name", "assign undeclared = 1;",
                f'`line 1 "\r{LINE}\r" 0\n')
    for how, body in against_the_bench():
        yield build("bench", how, body)
    for task in ("$finish", "\\$finish ", "$stop", "$fatal(0)"):
        stopping = right.replace("endmodule", f"initial #6 {task};\nendmodule")
        yield Attack("stop", task, SCALE + stopping)
    yield build("stop", "by a function", "initial leave;",
                "task leave; #1 $finish; endtask")
    for _, name in found.inputs[:2]:
        yield build("drive", f"assign {name}", f"assign {name} = 0;")
        yield build("drive", f"force {name}", f"initial force {name} = 0;")
        for direction in ("inout", "output"):
            yield build("drive", f"{name} as {direction}", f"assign {name} = 0;",
                        top=header(found, "wire", {name: direction}))
        yield build("drive", f"{name} below", f"Pull pull({name});",
                    after="module Pull(inout a); assign a = 0; endmodule\n")
        yield build("drive", f"tran {name}", f"supply0 low; tran t({name}, low);")
    for how, body in reading_files(problem):
        yield build("file", how, body)
    yield build("file", "$fopen", 'integer f; initial f = $fopen("owned", "w");')
    yield build("file", "$readmemh", 'reg [7:0] m [0:9]; initial $readmemh("ref.sv", m);')
    yield build("file", "$dumpfile", 'initial begin $dumpfile("x"); $dumpvars(0, TopModule); end')
    yield build("file", "$system", 'initial $system("true");')
    yield Attack("include", "`include", f'`include "ref.sv"\n{wires}\n  {zero}\nendmodule\n')
    yield Attack("include", "`line", f'`line 1 "test.sv" 0\n{wires}\n  {zero}\nendmodule\n')
    yield build("random", "$random", "integer r; initial r = $random;")
    yield build("random", "$urandom", "integer r; initial r = $urandom;")
    yield build("endless", "loop", "reg x = 0; initial while (1) x = ~x;")


def attacks(problem, turn, each=25):
    """About `each` attacks on one problem; over many problems (`turn` counts them) all take turns.

    Two readings that fooled a judge which compiled the candidate alone are always among them.
    """
    found = facts(problem)
    yield reading(found, "task", "always", "instance")
    yield reading(found, "function", "polling", "from the top")
    combined = list(itertools.product(DECOYS, WAYS, paths(found)))
    new = [(decoy, way, path) for decoy, way, path in combined  # what Icarus 11 cannot read
           if path in ("root", "unit", "package")]
    for place in range(each // 2):
        pool = new if place % 6 == 5 else sorted({*combined} - {*new})
        yield reading(found, *pool[(turn * 97 + place * 61) % len(pool)])
    rest = [attack for attack in others(problem, found)
            if attack.kind != "endless" or turn % 10 == 0]
    for place in range(each - each // 2):
        yield rest[(turn * (each - each // 2) + place) % len(rest)]


def every(folders, each=25):
    """(problem, attack) for all problems of some folders."""
    turn = itertools.count()
    for folder in folders:
        for problem in exams.load_problems(folder):
            for attack in attacks(problem, next(turn), each):
                yield problem, attack
