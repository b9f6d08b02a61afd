"""verilog/judging.py against attacks, honest answers and verilog-eval's own rules.

    VERILOG_EVAL_DIR=/path/to/verilog-eval .venv/bin/python -m pytest tests/test_judge.py
"""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT, program

import generate
import mutants

from tables.errors import UserError
from verilog import judging as judge, problems as exams, programs, sandbox

FIXTURES = ROOT / "tests" / "fixtures"
PROBLEMS = {p.name: p for p in exams.load_problems(FIXTURES / "verilog_eval")}
TINY = {p.name: p for p in exams.load_problems(ROOT / "data" / "tiny_eval")}
QUICK = sandbox.Limits(seconds=2)
CANDIDATES = sorted((ROOT / "tests" / "hostile").glob("*.sv"))
HOSTILE = [path for path in CANDIDATES if path.name.startswith("bad_")]
GREEDY = re.compile("bomb|endless|growing|loop")  # names of candidates that a limit ends
CHECKOUT = os.environ.get("VERILOG_EVAL_DIR")


def read_candidate(path):
    """(problem, accepted categories, code), by the first line; None accepted: it must not pass."""
    code = path.read_bytes().decode()
    name, _, accepted = code.split("\n", 1)[0].strip().removeprefix("// ").partition(": ")
    return PROBLEMS[name], accepted.split("|") if accepted else None, code


def right(problem):
    return problem.reference.replace("RefModule", "TopModule")


def with_wires(problem):
    """The same problem with nets for the testbench's variables: an answer can drive its inputs."""
    text = problem.testbench.replace("logic reset;", "wire reset;").replace(
        "logic [7:0] d;", "wire [7:0] d;"
    )
    return dataclasses.replace(problem, testbench=text)


def together(problem, code, limits=QUICK):
    """verilog-eval's own way, all in one program: (category, (mismatches, samples) or None)."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name, text in (("top", code), ("test", problem.testbench), ("ref", problem.reference)):
            (folder / f"{name}.sv").write_text(text, errors="replace")
        log, _, ended = sandbox.run_limited(
            "iverilog -Wall -Winfloop -Wno-timescale -g2012 -s tb -o program "
            "top.sv test.sv ref.sv".split(),
            folder,
            limits,
        )
        if (folder / "program").exists() and not ended:
            printed, _, ended = sandbox.run_limited("vvp -n program -none".split(), folder, limits)
            log += printed
        letter, why, count = judge.analyze(log)
        return judge._verdict(
            {"time": "T", "output": "R"}.get(ended, letter), why, code, log, count
        ).category, count


# ---- Attacks ----


@pytest.mark.parametrize("path", CANDIDATES, ids=lambda path: path.stem)
def test_stored_candidates(path, tmp_path):
    """Hostile ones never pass, honest ones are judged by what they do; nothing is left outside."""
    problem, accepted, code = read_candidate(path)
    code, start = code.replace("OUTSIDE", str(tmp_path)), time.monotonic()
    verdict = judge.judge(problem, code, QUICK)
    if accepted:
        assert verdict.category in accepted and "refused" not in accepted, verdict
    else:
        assert not verdict.passed
        assert GREEDY.search(path.stem) or not judge.judge(with_wires(problem), code, QUICK).passed
    assert time.monotonic() - start < 60 and list(tmp_path.iterdir()) == []


def test_the_attacks_are_real():
    """verilog-eval's own analyzer passes many of them."""
    fooled = []
    for path in HOSTILE:
        problem, _, code = read_candidate(path)
        if (
            not GREEDY.search(path.stem)
            and "OUTSIDE" not in code
            and any(
                together(variant, code)[0] == "pass" for variant in (problem, with_wires(problem))
            )
        ):
            fooled.append(path.stem)
    assert len(fooled) >= 25, fooled


# One wall per class of attack. Each is tested alone, with every other wall down.
KINDS = {
    "say": ("print",),
    "stop or hold time": ("stop", "endless", "disable", "bench"),
    "touch files": ("file", "include"),
    "reach by name": (
        "read",
        "write",
        "call",
        "constant",
        "defparam",
        "bind",
        "redefine",
        "instance",
        "macro",
        "drive",
        "random",
    ),
}
WALLS = {
    "calls": lambda patch: patch.setattr(judge, "forbidden_call", lambda program, known: None),
    "files": lambda patch: patch.setattr(judge, "foreign_file", lambda listed: None),
    "to the end": lambda patch: patch.setattr(
        judge, "cut_short", lambda status, answers, end: False
    ),
    "names": lambda patch: patch.setattr(judge, "drawn_letters", lambda: generate.KNOWN),
}
STANDING = {
    "say": (),
    "stop or hold time": ("to the end",),
    "touch files": ("calls", "files"),
    "reach by name": (),
}


def knowing(problem, attack):
    """The same attack by somebody who knows what stands behind each name of the testbench."""
    names = set(re.findall(rf"([\w$]+){programs.SECRET}", judge._prepare(problem).bench))
    code = programs.renamed(attack.code, names).replace(programs.SECRET, generate.KNOWN)
    return dataclasses.replace(attack, how=attack.how + ", names known", code=code)


def passing(attacks):
    """The attacks that the judge lets pass."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(lambda pair: judge.judge(pair[0], pair[1].code, QUICK), attacks)
        return [
            (p.name, attack.kind, attack.how)
            for (p, attack), verdict in zip(attacks, verdicts, strict=True)
            if verdict.passed
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_wall_stops_its_class_alone(kind, monkeypatch):
    """What an answer says or reaches for is stopped by the two programs alone: no wall stands."""
    for name, take_down in WALLS.items():
        if name not in STANDING[kind]:
            take_down(monkeypatch)
    problem = TINY["Prob031_updown"]
    found = generate.facts(problem)
    attacks = [
        (problem, attack)
        for attack in generate.others(problem, found)
        if attack.kind in KINDS[kind]
    ]
    if kind == "reach by name":
        attacks += [
            (problem, attack)
            for attack in generate.attacks(problem, 3, 12)
            if attack.kind == "read"
        ]
    attacks += [(problem, knowing(problem, attack)) for _, attack in attacks]
    assert len(attacks) >= 20 and passing(attacks) == []


@pytest.mark.slow
def test_two_thousand_generated_attacks_do_not_pass():
    attacks = list(generate.every([ROOT / "data" / "tiny_eval", FIXTURES / "verilog_eval"], 60))
    assert len(attacks) >= 2000 and len({problem.name for problem, _ in attacks}) >= 20
    assert {attack.kind for _, attack in attacks} <= set(itertools.chain(*KINDS.values()))
    assert passing(attacks) == []


def test_an_answer_that_learns_every_name_learns_nothing():
    """A secret in the scope's name once marked the testbench's line, and %m told it."""
    for problem in (*PROBLEMS.values(), TINY["Prob031_updown"]):
        empty = "module TopModule; {} endmodule"
        for body in (
            'reg [8*200:1] s; initial begin $sformat(s, "%m"); '
            '$display("%0sMismatches: 0 in 9 samples", s); end',
            'initial begin $display("Mismatches: 0 in 406 samples"); $finish; end',
        ):
            assert not judge.judge(problem, empty.format(body), QUICK).passed
            ports = generate.header(generate.facts(problem), "wire")
            assert not judge.judge(problem, f"{ports} {body} endmodule", QUICK).passed


def test_the_words_of_the_compiler_do_not_acquit(monkeypatch):
    """Icarus 12 writes the name in a `line raw: with carriage returns, an empty module passed."""
    problem, compiled = TINY["Prob031_updown"], judge._compile
    empty = generate.header(generate.facts(problem), "wire") + " endmodule"
    warned = empty.replace("endmodule", "assign undeclared = 1; endmodule")
    named = f'`line 1 "\r{generate.LINE}\r" 0\n{warned}'
    assert not judge.judge(problem, named, QUICK).passed
    monkeypatch.setattr(
        judge, "_compile", lambda *given: (f"{generate.LINE}\n{compiled(*given)[0]}", 0, None)
    )
    verdict = judge.judge(problem, empty, QUICK)
    assert (verdict.category, verdict.letter) == ("mismatch", "R") and verdict.mismatches > 0


def test_no_reference_lies_where_the_answer_runs(monkeypatch):
    seen, run = [], judge.run_limited

    def watched(command, folder, limits):
        if command[:3] == ["vvp", "-n", "exam"]:
            seen.append({path.name for path in folder.iterdir()})
        return run(command, folder, limits)

    monkeypatch.setattr(judge, "run_limited", watched)
    assert judge.judge(TINY["Prob031_updown"], right(TINY["Prob031_updown"])).passed
    assert seen == [{*judge.SOURCES, "exam", "files"}]


@pytest.mark.parametrize(
    "line",
    [
        '    %vpi_call/w 2 5 "$system", "x" {0 0 0};',
        'L_0x1/d .sfunc/e 2 5 "$system", E_1;',
        '   "name"%vpi_func 2 5 "$system" 32 {0 0 0};',
    ],
)
def test_a_call_counts_wherever_it_stands(line):
    assert judge.forbidden_call(line, {}) == "$system"
    assert judge.forbidden_call(line.replace("$system", "$display"), {}) is None


# ---- The same verdicts as verilog-eval ----


def mutations(problem, count, generator):
    """The reference with one or two operators, numbers or edges changed: most are wrong."""
    swaps = {
        "&": "|",
        "|": "^",
        "^": "&",
        "+": "-",
        "==": "!=",
        "posedge": "negedge",
        "<=": "=",
        "0": "1",
        "1": "0",
        "~": "",
        "!": "",
        "<": ">",
        "2": "3",
    }
    pattern = re.compile("|".join(map(re.escape, sorted(swaps, key=len, reverse=True))))
    for _ in range(count):
        code = right(problem)
        for _ in range(generator.choice((1, 1, 2))):
            found = list(pattern.finditer(code, code.find(";")))
            if found:
                one = generator.choice(found)
                code = code[: one.start()] + swaps[one[0]] + code[one.end() :]
        yield code


def differing(problems, each):
    """Answers whose category or count differs from a run in one program.

    A problem whose own reference doesn't compile there is broken, whoever answers it: Icarus 11
    refuses three of verilog-eval's.
    """
    generator = random.Random(0)
    cases = [(p, code) for p in problems for code in (right(p), *mutations(p, each, generator))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mine = list(pool.map(lambda case: judge.judge(*case), cases))
        theirs = list(pool.map(lambda case: together(*case, sandbox.Limits()), cases))
    broken = set()
    for (problem, code), (category, _) in zip(cases, theirs, strict=True):
        if category == "compile" and code == right(problem):
            broken.add(problem.name)
    unequal = []
    for (problem, code), verdict, (category, count) in zip(cases, mine, theirs, strict=True):
        if problem.name in broken:
            equal = verdict.category == "broken problem"
        elif category == "compile":
            equal = verdict.category == "compile"
        else:
            mismatches = count and count[0]
            equal = (verdict.category, verdict.mismatches) == (category, mismatches)
        if not equal:
            unequal.append((problem.name, verdict.category, verdict.mismatches, category, code))
    return len(cases), unequal


def test_verdicts_and_counts_equal_those_of_one_program():
    """Also where the testbench itself races (values assigned at the edge that samples them)."""
    number, different = differing([*PROBLEMS.values(), *list(TINY.values())[::8]], 2)
    assert number >= 20 and different == []


def test_a_second_driver_is_judged_as_in_one_program():
    """verilog-eval's testbenches connect a `logic`, which bears none; a wire would."""
    problem = PROBLEMS["Prob022_mux2to1"]
    twice = right(problem).replace("endmodule", "assign out = sel ? b : a;\nendmodule")
    assert judge.judge(problem, twice, QUICK).category == together(problem, twice)[0] == "compile"


# What a module around the reference does with each output: a moment or an x tells them apart.
SHELLS = (
    "assign #1 {o} = {i};",
    "assign #5 {o} = {i};",
    "always @({i}) {o} <= #5 {i};",
    "always @(*) {o} = {i};",
    "always @(*) {o} <= {i};",
    "always @(*) begin {o} = ~{i}; #0 {o} = {i}; end",
    "always @(*) begin {o} = ~{i}; {o} <= {i}; end",
    "always @({i}) begin {o} = ~{i}; #1 {o} = {i}; end",
    "reg b{o} = 1; initial #1 b{o} = 0; assign {o} = b{o} ? 'bx : {i};",
    "assign {o} = (^{i} === 1'bx) ? 'bz : {i};",
    "assign {o} = (^{i} === 1'bx) ? 'b0 : {i};",
    "assign {o} = 'bx;",
    "assign {o} = 'bz;",
)
CLOCKED = (
    "always @(negedge clk) {o} <= {i};",
    "always @(posedge clk) {o} = {i};",
    "always @(negedge clk) #0 {o} = {i};",
    "always @(*) if (!clk) {o} = {i};",
    "assign {o} = clk ? {i} : 'bx;",
)


def in_shells(problem):
    found = generate.facts(problem)
    for shell in (*SHELLS, *(CLOCKED if any(name == "clk" for _, name in found.inputs) else ())):
        wires = " ".join(f"wire {generate.bits(w)}i_{n};" for w, n in found.outputs)
        ports = ", ".join(
            [f".{n}({n})" for _, n in found.inputs] + [f".{n}(i_{n})" for _, n in found.outputs]
        )
        yield "\n".join(
            [
                problem.reference.replace("RefModule", "Inner"),
                generate.header(found, "reg" if "always" in shell else "wire"),
                wires,
                f"Inner inner({ports});",
                *(shell.format(o=n, i=f"i_{n}") for _, n in found.outputs),
                "endmodule",
            ]
        )


def test_what_only_timing_tells_apart_is_judged_as_in_one_program():
    """An input that's set where it's declared once woke `always @(*)`, which it doesn't."""
    early = dataclasses.replace(
        PROBLEMS["Prob022_mux2to1"],
        testbench=PROBLEMS["Prob022_mux2to1"].testbench.replace(
            "output logic a,b,sel", "output reg a = 0, output reg b = 0, output reg sel = 0"
        ),
    )
    assert early != PROBLEMS["Prob022_mux2to1"]
    cases = [
        (p, code)
        for p in (early, PROBLEMS["Prob041_dff8r"], TINY["Prob031_updown"])
        for code in in_shells(p)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mine = pool.map(lambda case: judge.judge(*case), cases)
        theirs = pool.map(lambda case: together(*case, sandbox.Limits()), cases)
        for (problem, code), verdict, (category, count) in zip(cases, mine, theirs, strict=True):
            assert (verdict.category, verdict.mismatches) == (category, count and count[0]), (
                problem.name,
                code,
            )


@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKOUT, reason="VERILOG_EVAL_DIR names no checkout of NVlabs/verilog-eval"
)
def test_verdicts_equal_those_of_one_program_on_the_full_set():
    number, different = differing(exams.load_problems(Path(CHECKOUT) / "dataset_spec-to-rtl"), 4)
    assert len(different) <= 0.005 * number, different


@pytest.mark.parametrize("connection", ["(.*)", "(a, o_dut)", "(.a, .o(o_dut))"])
def test_every_way_to_connect_the_answer(connection):
    bench = f"""`timescale 1 ps/1 ps
module tb;
  reg [3:0] a = 0; wire [3:0] o_ref, o_dut; integer errors = 0, n = 0;
  {"wire [3:0] o; assign o_dut = o;" if "*" in connection else ""}
  RefModule good1(.a(a), .o(o_ref));
  TopModule top_module1 {connection};
  initial begin
    repeat (40) begin #5 n = n + 1; if (o_ref !== o_dut) errors = errors + 1; a = a + 1; end
    $display("Mismatches: %1d in %1d samples", errors, n);
  end
endmodule"""
    problem = exams.Problem(
        "p",
        "p",
        "module RefModule(input [3:0] a, output [3:0] o);\n  assign o = a + 3;\nendmodule\n",
        bench,
    )
    assert judge.judge(problem, right(problem), QUICK).passed
    assert judge.judge(problem, right(problem).replace("3;", "4;"), QUICK).mismatches == 40


def test_agreement_with_the_official_analyzer():
    """353 logs, letters by sv-iv-analyze (tests/fixtures/README.md); `r` depends on the code."""
    cases = json.loads((FIXTURES / "analyzer.json").read_text())["cases"]
    assert len({case["letter"] for case in cases}) >= 12
    for case in cases:
        assert judge.analyze(case["log"])[0] == case["letter"].replace("r", "R"), case


@pytest.mark.skipif(
    not CHECKOUT, reason="VERILOG_EVAL_DIR names no checkout of NVlabs/verilog-eval"
)
@pytest.mark.parametrize(
    "folder, winnable",
    [("dataset_spec-to-rtl", {11: 151, 12: 152}),
     ("dataset_code-complete-iccad2023", {11: 152, 12: 153})],
)
def test_ceiling_of_the_full_set(folder, winnable):
    """References that show no mismatch but end in TIMEOUT, which verilog-eval fails."""
    version = sandbox.icarus_version()[0]
    problems = exams.load_problems(Path(CHECKOUT) / folder)
    verdicts = judge.judge_many([(p, right(p)) for p in problems])
    late = set()
    for problem, verdict in zip(problems, verdicts, strict=True):
        if verdict.category == "timeout" and verdict.mismatches == 0:
            late.add(problem.name)
    expected = {"Prob082_lfsr32", "Prob141_count_clock"}
    if version == 12:
        expected.add("Prob156_review2015_fancytimer")  # Icarus 11 can't compile it
    assert len(problems) == 156 and late == expected
    assert sum(v.passed for v in verdicts) == winnable[version]
    assert sum(v.mismatches == 0 for v in verdicts) == winnable[version] + len(late)


def test_references_of_the_fixtures_and_of_the_tiny_benchmark_pass():
    verdicts = judge.judge_many([(p, right(p)) for p in (*PROBLEMS.values(), *TINY.values())])
    assert all(verdict.passed for verdict in verdicts), [v for v in verdicts if not v.passed]


# ---- What happens inside a time step ----


def unlike(results):
    """What the judge said otherwise than one program, of `mutants.measure`."""
    return [
        (
            candidate.problem.name,
            candidate.bench,
            candidate.mutation,
            candidate.clock,
            candidate.inputs,
            candidate.outputs,
            one,
            ours,
            candidate.code,
        )
        for candidate, one, ours in results
        if one != ours
    ]


def test_mutated_and_wrapped_references_are_judged_as_in_one_program():
    """To the number of mismatches. A replay of recorded inputs judged 22 of these 82 otherwise."""
    results = mutants.measure(
        [
            candidate
            for problem in mutants.shipped()
            for candidate in itertools.islice(mutants.candidates(problem, 17), 5, 7)
        ]
    )
    assert len(results) >= 70 and sum(one[0] == "pass" for _, one, _ in results) >= 10
    assert unlike(results) == []


@pytest.mark.parametrize("clock", mutants.CLOCKS)
def test_every_clock_is_the_testbench_s_own(clock):
    """What a flip-flop sees of a testbench that assigns at the edge depends on the clock's way."""
    problem = TINY["Prob031_updown"]
    found, candidates = generate.facts(problem), []
    for outputs in ("as it is", "glitch and #0", "with the clock"):
        code = mutants.wrapped(found, problem.reference, clock, "as it is", outputs)
        for bench in (problem, mutants.blocking(problem)):
            candidates.append(
                mutants.Candidate(bench, "", "none", clock, "as it is", outputs, code)
            )
    assert unlike(mutants.measure(candidates)) == []


def test_a_pulse_of_no_width_arrives():
    """Inputs go up and down in one time step: an answer that counts edges counts them."""
    bench = """`timescale 1 ps/1 ps
module tb;
  reg a = 0; wire [7:0] n_ref, n_dut; integer errors = 0, samples = 0;
  RefModule good1(.a, .n(n_ref));
  TopModule top_module1(.a, .n(n_dut));
  initial begin
    repeat (20) begin
      #5 a = 1; #0 a = 0;
      #5 samples = samples + 1;
      if (n_ref !== n_dut) errors = errors + 1;
    end
    $display("Mismatches: %1d in %1d samples", errors, samples);
  end
endmodule"""
    problem = exams.Problem(
        "p",
        "p",
        "module RefModule(input a, output reg [7:0] n);\n  initial n = 0;\n"
        "  always @(posedge a) n <= n + 1;\nendmodule\n",
        bench,
    )
    for code in (
        right(problem),
        right(problem).replace("pos", "neg"),
        right(problem).replace("n + 1", "n + 2"),
        right(problem).replace("@(posedge a)", "@(a) if (a)"),
    ):
        verdict, (category, count) = judge.judge(problem, code, QUICK), together(problem, code)
        assert (verdict.category, verdict.mismatches) == (category, count[0]), code


@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKOUT, reason="VERILOG_EVAL_DIR names no checkout of NVlabs/verilog-eval"
)
def test_three_thousand_mutants_are_judged_as_in_one_program():
    results = mutants.measure(mutants.everything(CHECKOUT, 17))
    assert len(results) >= 3000 and unlike(results) == []


# ---- Names, and calls that harm nobody ----


@pytest.mark.parametrize("name", ["EndOfExam", "ExamOfTopModule", "Recorder", "end_of_exam"])
def test_a_helper_may_have_any_name(name):
    problem = PROBLEMS["Prob041_dff8r"]
    helper = f"module {name}; endmodule\n"
    assert judge.judge(problem, f"{right(problem)}\n{helper}", QUICK).passed
    assert judge.judge(problem, f"{right(problem)}\n{helper}/*", QUICK).category == "compile"


@pytest.mark.parametrize(
    "call",
    [
        "$display($simtime);",
        "$deposit(a, 3);",
        "$fflush;",
        "$fflush(1);",
        "$q_initialize(1, 2, 3, r);",
        '$fdisplay(1, "x");',
        '$fwrite(32\'h8000_0002, "x");',
        "$fstrobe(32'h8000_0001, r);",
        '$readmemh("rom.hex", m);',
        '$readmemb("rom.bin", m, 0, 2);',
    ],
)
def test_harmless_calls_are_judged_as_in_one_program(call):
    problem = PROBLEMS["Prob041_dff8r"]
    body = f"reg [7:0] a, m [0:3]; integer r = 1;\n  initial begin {call} end"
    code = right(problem).replace("endmodule", f"  {body}\nendmodule")
    assert judge.judge(problem, code, QUICK).category == together(problem, code)[0] == "pass"


@pytest.mark.parametrize(
    "call",
    [
        '$readmemh("bench.sv", m);',
        '$readmemh("/etc/hostname", m);',
        '$readmemb("../x", m);',
        "$readmemh(name, m);",
        '$readmemh("answers.txt", m);',
        "$fdisplay(r, 1);",
        "$fdisplay(32'h8000_0003, 1);",
        "$fdisplay(2, 1);",
        "$fflush(r);",
        "$fwrite(1 + r, 1);",
    ],
)
def test_the_same_calls_with_a_file_are_refused(call):
    problem = PROBLEMS["Prob041_dff8r"]
    body = (
        f'reg [63:0] name = "ref.sv"; reg [7:0] m [0:3]; integer r = 1;\n  initial begin {call} end'
    )
    verdict = judge.judge(
        problem, right(problem).replace("endmodule", f"  {body}\nendmodule"), QUICK
    )
    assert verdict.category == "refused" and verdict.detail.startswith("calls $"), verdict


def test_a_line_whose_quotes_do_not_balance_is_refused(monkeypatch):
    problem = PROBLEMS["Prob041_dff8r"]
    quoted = right(problem).replace("endmodule", '  wire \\a"b = clk;\nendmodule')
    assert judge.judge(problem, quoted, QUICK).passed  # Icarus escapes this one
    assert judge.unbalanced_line('v0 .net "a\\"b", 0 0;\nv1 .net "c", 0 0;') is None
    assert judge.unbalanced_line('v1 .net "c", 0 0;\nv0 .net "a"b", 0 0;') == 'v0 .net "a"b", 0 0;'
    read = judge._read
    monkeypatch.setattr(judge, "_read", lambda path: read(path).replace('a\\"b', 'a"b'))
    assert judge.judge(problem, quoted, QUICK).category == "refused"


def test_an_answer_does_not_reach_the_testbench():
    """It runs in the answer's program, under names that are drawn anew for each exam."""
    problem = PROBLEMS["Prob140_fsm_hdlc"]
    for body in (
        "wire x = tb.stim1.reset;",
        "wire x = stim1.reset;",
        "wire x = tb.clk;",
        "stimulus_gen s(.clk(clk));",
        "initial tb.wait_for_end_of_timestep;",
        "initial wait_for_end_of_timestep;",
        "wire x = good1.clk;",
    ):
        code = right(problem).replace("endmodule", f"  {body}\nendmodule", 1)
        assert together(problem, code)[0] == "pass" or "stimulus_gen" in body, body
        assert judge.judge(problem, code, QUICK).category == "compile", body
    assert judge._prepare(problem).bench.count(programs.SECRET) > 10
    details = {judge.judge(problem, code, QUICK).detail for _ in range(3)}
    assert len(details) == 1 and programs.SECRET not in details.pop()


# ---- The room stands alone ----


def test_the_example_of_the_room_runs_from_an_empty_folder(tmp_path):
    """Its docstring's five lines, with nothing else of this repository."""
    import verilog

    for name in ("tables", "verilog", "data/tiny_eval"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    example = re.search(r"(?:^    .*\n)+", verilog.__doc__, re.MULTILINE)[0]
    found = program(
        sys.executable,
        "-c",
        re.sub("^    ", "", example, flags=re.MULTILINE),
        cwd=tmp_path,
        PYTHONPATH="",
    )
    assert found.stdout.strip() == "['pass', 'mismatch'] 0.5", found.stderr


# ---- Limits, and input that is wrong ----


def test_limits_hold(tmp_path):
    small = sandbox.Limits(seconds=1, memory=256 << 20, output=1000, file=4096)
    start = time.monotonic()
    assert sandbox.run_limited(["sh", "-c", "sleep 60 & sleep 60"], tmp_path, small)[2] == "time"
    assert sandbox.run_limited(["sh", "-c", "while :; do :; done"], tmp_path, small)[2] == "time"
    printed, _, ended = sandbox.run_limited(["yes"], tmp_path, small)
    assert ended == "output" and len(printed) == 1000
    sandbox.run_limited(["sh", "-c", "yes > big"], tmp_path, small)
    assert (tmp_path / "big").stat().st_size <= 4096
    code = "x = bytearray(1 << 30); print('got it')"
    assert "got it" not in sandbox.run_limited([sys.executable, "-c", code], tmp_path, small)[0]
    assert time.monotonic() - start < 60
    marker = f"sleep 60.{os.getpid()}"
    sandbox.run_limited(["sh", "-c", f"{marker} & {marker}"], tmp_path, small)
    for _ in range(50):  # a killed process stays in the list until the kernel has taken it down
        shown = program("ps", "-eo", "args").stdout
        if marker not in shown:
            break
        time.sleep(0.1)
    assert marker not in shown


@pytest.mark.skipif(not sandbox.network_guard(), reason="this machine does not allow unshare -n")
def test_no_network(tmp_path):
    code = "import socket; socket.create_connection(('127.0.0.1', {})); print('reached')"
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        command = [sys.executable, "-c", code.format(server.server_port)]
        assert (
            "reached" in subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        )
        assert "reached" not in sandbox.run_limited(command, tmp_path, sandbox.Limits(5))[0]


def test_answers_that_are_none_and_problems_that_are_incomplete():
    problem = PROBLEMS["Prob041_dff8r"]
    assert judge.judge(problem, None).category == judge.judge(problem, "  \n").category == "no code"
    start = time.monotonic()
    verdict = judge.judge(problem, right(problem) + " " * (100 << 20))
    assert (
        verdict.category == "refused"
        and "longer than" in verdict.detail
        and time.monotonic() - start < 5
    )


def test_a_broken_problem_is_no_verdict_on_an_answer():
    """verilog-eval has some that Icarus can't compile: the category says whose fault that is."""
    problem = PROBLEMS["Prob041_dff8r"]
    broken = dataclasses.replace(problem, reference=problem.reference.replace("output", "outpt"))
    verdict = judge.judge(broken, right(problem))
    assert (verdict.category, verdict.letter) == (
        "broken problem",
        "C",
    ) and "ref.sv:" in verdict.detail
    assert judge.judge(dataclasses.replace(problem, testbench=""), "x").category == "broken problem"
    silent = dataclasses.replace(problem, testbench="module tb; TopModule t(); endmodule")
    with pytest.raises(
        UserError, match="Prob041_dff8r can't be judged: its testbench prints no line"
    ):
        judge.judge(silent, right(problem))


def test_broken_problems_are_named_once_before_answers_are_judged(capsys, monkeypatch):
    """Else nobody would know that three of verilog-eval's 156 can't be won by anyone."""
    problem = PROBLEMS["Prob041_dff8r"]
    reference = problem.reference.replace("output", "ouput")
    broken = dataclasses.replace(problem, name="Prob999", reference=reference)
    pairs = [(broken, right(problem)), (problem, right(problem)), (broken, None)]
    judged = judge.judge

    def judge_aloud(*words):
        print("judging an answer")
        return judged(*words)

    monkeypatch.setattr(judge, "judge", judge_aloud)
    found = [verdict.category for verdict in judge.judge_many(pairs)]
    assert found == ["broken problem", "pass", "no code"]
    monkeypatch.undo()
    said = capsys.readouterr().out
    assert said.startswith("1 of 2 problems are broken") and "judging an answer" in said
    judge.judge_many(pairs[:2])
    assert capsys.readouterr().out == ""
    second = dataclasses.replace(broken, name="Prob998")
    judge.judge_many([(second, "x"), *pairs])
    said = capsys.readouterr().out
    assert re.search(r"1 of 3 .*Icarus \d+\.\d+ can't compile their own .*\(Prob998\)$", said)


def test_what_icarus_is_sorry_for_is_the_reason():
    """It once was "the testbench never reported", though no testbench had run."""
    problem = PROBLEMS["Prob041_dff8r"]
    code = right(problem).replace("endmodule", "wire z = clk inside {0, 1};\nendmodule")
    verdict = judge.judge(problem, code, QUICK)
    assert verdict.passed or (verdict.category == "compile" and "sorry" in verdict.detail), verdict


def test_a_compiler_that_fails_is_no_verdict_on_an_answer(tmp_path, monkeypatch):
    for name in ("iverilog", "vvp"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'sh: 1: Syntax error: Unterminated quoted string'\nexit 2\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    judge._prepare_once.cache_clear()
    with pytest.raises(UserError, match="can't be judged"):
        judge.judge(PROBLEMS["Prob041_dff8r"], right(PROBLEMS["Prob041_dff8r"]))


@pytest.mark.parametrize(
    "name",
    ["a b", "a,b", "a:b", "a=b", "[a]", "100%", "$HOME", "$", "it's", 'a"b', "Müll", "a;b", "`a`"],
)
def test_temporary_files_may_lie_anywhere(name, tmp_path, monkeypatch):
    """A `$` in TMPDIR once made every answer a "compile": Icarus's shell read a variable."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    judge._prepare_once.cache_clear()
    assert judge.judge(PROBLEMS["Prob041_dff8r"], right(PROBLEMS["Prob041_dff8r"]), QUICK).passed


def test_threads_prepare_a_problem_once(monkeypatch):
    prepared, made = [], judge._made

    def slow(problem):
        prepared.append(problem)
        time.sleep(0.2)
        return made(problem)

    monkeypatch.setattr(judge, "_made", slow)
    judge._prepare_once.cache_clear()
    problem = PROBLEMS["Prob041_dff8r"]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda _: judge.judge(problem, right(problem), QUICK), range(8)))
    assert prepared == [problem] and all(verdict.passed for verdict in verdicts)


@pytest.mark.parametrize("noise", ["(" * 200_000, "begin " * 200_000, "\0\udcff", "[" * 200_000])
def test_an_answer_of_brackets_is_judged_like_any_other(noise):
    problem = PROBLEMS["Prob041_dff8r"]
    assert not judge.judge(
        problem, right(problem).replace("q <= d", f"q <= {noise} d"), QUICK
    ).passed
