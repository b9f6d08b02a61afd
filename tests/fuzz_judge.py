"""Mutate hostile and honest candidates by the thousand; whatever passes must equal the reference.

    nice -n 15 .venv/bin/python tests/fuzz_judge.py [--count 10000] [--out runs/fuzz] [--seed 0]

Only mutations that compile the way verilog-eval compiles count, each once. A mutation that passes is
simulated beside the reference in a testbench of our own that knows nothing but the ports, with random
stimuli that the problem's testbench does not use. The file `OUT/fuzz.jsonl` holds one line per
mutation, so an interrupted run goes on; `OUT/differ_*.sv` are passes that disagree with the reference
there. Exit code 1 if there is one that `--known` (a file of hashes, looked at by hand) does not list.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hostile")]

import generate  # noqa: E402

from helpers import Progress
from verilog import judging as judge, problems as exams, sandbox  # noqa: E402

LIMITS = sandbox.Limits(seconds=1)  # of processor time, three by the clock
TOKEN = re.compile(r"""//[^\n]*|"(?:[^"\\\n]|\\.)*"|\\\S+|[$`]?[A-Za-z_][\w$]*|\d*'[sS]?[bodhBODH]\w+
    |\d+|<=|>=|==|!=|&&|\|\||<<|>>|\s+|.""", re.X | re.S)
OPERATORS = ("+", "-", "*", "&", "|", "^", "<<", ">>", "==", "!=", "<", "&&", "||")
STATEMENTS = (  # {0}, {1}: names of the problem's; put in at the end of a module
    "initial {0} = {1};", "always #1 {0} = {1};", "assign {0} = {1};", "always @(*) {0} = {1};",
    "initial force {0} = {1};", "always @({0}) {1} <= 0;", "wire spare = {0};", "reg {0};",
    "localparam Q = {0};", "defparam {0} = 1;", "initial disable {0};", "tran ({0}, {1});",
    "generate if (1) begin : g assign {0} = {1}; end endgenerate", "initial assign {0} = {1};",
    "buf ({0}, {1});", "initial fork {0} = 0; join", "initial wait ({0}) {1} = 1;",
    "always @(posedge {0}) {1} <= ~{1};", "final $display({0});", "initial $display(\"%m\", {0});",
    "function f(input z); f = {0}; endfunction", "RefModule r ({0}, {1});", "initial -> {0};",
    "task {0}; ; endtask", "begin : {0} reg {1}; end", "pullup ({0});", "integer {0} = 0;")
UNITS = ("task {0}; reg {1}; ; endtask", "function {0}(input z); reg {1}; {0} = z; endfunction",
         "package {0}; reg {1}; endpackage", "parameter {0} = 1;", "reg [7:0] {0};",
         "module {0}(input a, output b); assign b = {1}; endmodule", "`define {0} {1}",
         "typedef reg [3:0] {0};", "class {0}; int {1}; endclass", "`default_nettype none")


def sources():
    """[(problem, code, the problem's names)]: files, references and attacks, those that compile."""
    folders = [ROOT / "tests/fixtures/verilog_eval", ROOT / "data/tiny_eval"]
    problems = {p.name: p for folder in folders for p in exams.load_problems(folder)}
    names = {}
    for name, problem in problems.items():
        found = generate.facts(problem)
        one = found.reference
        names[name] = tuple(sorted({one, "tb", found.stimulus, "RefModule", found.stimulus_module,
                             *found.variables, *found.internals, *found.parameters, *(
                                 f"{path}.{port}" for _, _, port in found.ports
                                 for path in (one, f"tb.{one}", "tb")),
                             *(port for _, _, port in found.ports)}))
    cases = [(problems[name], p.reference.replace("RefModule", "TopModule"))
             for name, p in problems.items() for _ in range(6)]
    for path in sorted((ROOT / "tests" / "hostile").glob("*.sv")):
        first, code = path.read_bytes().decode().split("\n", 1)
        if "OUTSIDE" not in code and "endless" not in path.name and "big" not in path.name:
            cases.append((problems[first.strip().removeprefix("// ").split(": ")[0]], code))
    for turn, problem in enumerate(problems.values()):
        cases += [(problem, attack.code) for attack in generate.attacks(problem, turn, 20)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kept = pool.map(lambda case: compiles(*case), cases)
        return [(problem, code, names[problem.name])
                for (problem, code), fits in zip(cases, kept, strict=True) if fits]


def mutate(chosen, cases, names, generator):
    """One to three small changes: an operator, number or name, a line, a statement, a declaration."""
    tokens = TOKEN.findall(chosen)

    def some(pattern):
        return [at for at, token in enumerate(tokens) if re.fullmatch(pattern, token)]

    def named(text):
        return text.format(*(generator.choice(names) for _ in range(2)))

    def swap(pattern, choices):
        if places := some(pattern):
            tokens[generator.choice(places)] = generator.choice(choices)
    for _ in range(generator.choice((1, 1, 2, 3))):
        kind, own = generator.random(), [tokens[at] for at in some(r"[A-Za-z_]\w*")]
        if kind < 0.15:
            swap("|".join(map(re.escape, OPERATORS)), OPERATORS)
        elif kind < 0.25:
            swap(r"\d+", ("0", "1", "2", "3", "7", "8", "15"))
        elif kind < 0.35 and own:
            swap(r"[A-Za-z_]\w*", own)
        elif kind < 0.5:
            swap(r"[A-Za-z_]\w*", names)
        elif kind < 0.7 and (ends := some("endmodule")):
            tokens.insert(generator.choice(ends), f" {named(generator.choice(STATEMENTS))}\n")
        elif kind < 0.82:
            tokens.insert(0, named(generator.choice(UNITS)) + "\n")
        elif kind < 0.9 and (ends := some(";")):
            line = generator.choice(generator.choice(cases)[1].split("\n"))
            tokens.insert(generator.choice(ends) + 1, f"\n{line}\n")
        elif ends := some("\n *"):
            at = generator.choice(ends)
            del tokens[at:next((end for end in ends if end > at), at)]
    return "".join(tokens)


def compiles(problem, code):
    """True where verilog-eval's compilation takes it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("top", code), ("test", problem.testbench), ("ref", problem.reference)):
            (Path(folder) / f"{name}.sv").write_text(text, errors="replace")
        return sandbox.run_limited("iverilog -g2012 -s tb -o program top.sv test.sv ref.sv".split(),
                                 folder, LIMITS)[1] == 0


def agrees(problem, code, seed, samples=2000):
    """Candidate and reference side by side on random stimuli, by ports only; None if they agree.

    An input called clk or clock toggles; another keeps its value for a while (held), so that resets
    and enables are on and off for runs of cycles. An unknown bit of the reference matches anything.
    """
    ports = generate.facts(problem).ports
    clock = next((name for way, _, name in ports if way == "INPUT" and name in ("clk", "clock")), None)
    lines, draws = [], []
    for way, width, name in ports:
        if way == "INPUT":
            lines.append(f"reg {generate.bits(width)}{name} = 0;")
            value = "{" + ", ".join(["$urandom(seed)"] * (width // 32 + 1)) + "}"
            if name != clock:
                draws.append(f"if ($urandom(seed) % {3 if width > 1 else 4} != 0) {name} = {value};")
        else:
            lines.append(f"wire {generate.bits(width)}r_{name}, d_{name};")
    differ = " || ".join(f"(r_{n} !== (r_{n} ^ d_{n} ^ r_{n}))" for w, _, n in ports if w == "OUTPUT")
    given = ", ".join(f".{n}({n})" for w, _, n in ports if w == "INPUT")
    for kind, module in (("r", "RefModule"), ("d", "TopModule")):
        taken = ", ".join(f".{n}({kind}_{n})" for w, _, n in ports if w == "OUTPUT")
        lines.append(f"{module} {kind}_bench_instance({given}{', ' if given and taken else ''}{taken});")
    tick = f"{clock} = ~{clock};" if clock else ""
    mark = f"differ {random.Random(seed).getrandbits(64):x}"
    bench = "`timescale 1 ps/1 ps\nmodule own_bench;\n  integer seed = {}, bad = 0;\n  {}\n".format(
        seed % 100_000, "\n  ".join(lines)) + (
        f"  initial begin\n    repeat ({samples}) begin {' '.join(draws)} #3 {tick} #2 "
        f"if ({differ or 0}) bad = bad + 1; end\n    $display(\"{mark} %0d\", bad); $finish;\n  end\n"
        "endmodule\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("top", code), ("ref", problem.reference), ("bench", bench)):
            (Path(folder) / f"{name}.sv").write_text(text, errors="replace")
        limits = sandbox.Limits(seconds=10)
        printed, status, _ = sandbox.run_limited(
            "iverilog -g2012 -s own_bench -o program top.sv bench.sv ref.sv".split(), folder, limits)
        if status:
            return f"does not compile there: {printed[:200]}"
        printed, _, ended = sandbox.run_limited("vvp -n program".split(), folder, limits)
        found = re.search(rf"^{mark} (\d+)$", printed, re.M)
        if ended or not found:
            return f"did not end there ({ended}): {printed[-200:]}"
        return None if found[1] == "0" else f"{found[1]} of {samples} samples differ"


def one(index, seed, cases):
    """The mutation of this number: what became of it, as a row for the file."""
    generator = random.Random(f"{seed} {index}")
    problem, code, names = generator.choice(cases)
    text = mutate(code, cases, names, generator)
    row = {"index": index, "problem": problem.name,
           "hash": hashlib.sha256(f"{problem.name} {text}".encode()).hexdigest()[:16]}
    if not compiles(problem, text):
        return row | {"category": None}, text
    verdict = judge.judge(problem, text, LIMITS)
    row |= {"category": verdict.category, "detail": verdict.detail[:80]}
    return row | ({"differs": agrees(problem, text, index)} if verdict.passed else {}), text


def main():
    """Fuzz until `--count` different mutations that compile have been judged."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path, cases, lock, rows = given.out / "fuzz.jsonl", sources(), threading.Lock(), []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):
            rows.append(json.loads(line))
    done = {row["index"] for row in rows}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hashes = {row["hash"] for row in rows if row["category"]}
    progress = Progress(max(0, given.count - len(hashes)), "mutations that compile")
    numbers = (index for index in range(10**9) if index not in done)

    def work():
        while True:
            with lock:
                if len(hashes) >= given.count:
                    return
                index = next(numbers)
            row, text = one(index, given.seed, cases)
            with lock:
                if row.get("differs"):
                    (given.out / f"differ_{row['hash']}.sv").write_text(
                        f"// {row['problem']}: {row['differs']}\n{text}", errors="replace")
                if row["category"] and row["hash"] not in hashes:
                    hashes.add(row["hash"])
                    progress.update()
                rows.append(row)
                with open(path, "a") as file:
                    file.write(json.dumps(row) + "\n")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(work) for _ in range(os.cpu_count())]:
            future.result()
    judged = {row["hash"]: row for row in rows if row["category"]}
    known = set(given.known.read_text().split()) if given.known else set()
    differ = [row for row in judged.values() if row.get("differs") and row["hash"] not in known]
    print(f"{len(rows)} mutations, {len(judged)} different ones compile:",
          dict(collections.Counter(row["category"] for row in judged.values()).most_common()))
    print(f"passes that differ from the reference on other stimuli: {len(differ)}")
    for row in differ:
        print(" ", row["hash"], row["problem"], row["differs"])
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
