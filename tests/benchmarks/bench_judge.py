"""How long judging takes: in parallel, identical answers once, against one process after another.

    .venv/bin/python tests/benchmarks/bench_judge.py [folder of problems] [answers per problem]

Quick candidates: each problem's reference with a comment that makes every answer different, so that
nothing is saved by judging identical ones once; the last line shows what that saves. `sequence` runs
verilog-eval's two commands, with the waveform they write and without any protection.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verilog import judging as judge, problems as exams  # noqa: E402


def in_sequence(candidates):
    """verilog-eval's way: compile, run, one after the other; returns the number of passes."""
    passed = 0
    for problem, code in candidates:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("top", code), ("test", problem.testbench), ("ref", problem.reference)):
                (Path(folder) / f"{name}.sv").write_text(text)
            command = "iverilog -Wall -Winfloop -Wno-timescale -g2012 -s tb -o program top.sv test.sv ref.sv"
            log = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)
            text = log.stdout + log.stderr
            if (Path(folder) / "program").exists():
                text += subprocess.run(["vvp", "program"], cwd=folder, capture_output=True, text=True).stdout
            passed += judge.analyse(text)[0] == "pass"
    return passed


def main():
    """Print one line per way of judging."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "tiny_eval"
    each = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    problems = exams.load_problems(folder)
    codes = [(p, p.reference.replace("RefModule", "TopModule")) for p in problems]
    different = [(p, f"{code}\n// answer {index}\n") for p, code in codes for index in range(each)]
    print(f"{len(different)} answers to {len(problems)} problems in {folder.name}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")
    for name, work in (
            ("judge_many, all different", lambda: sum(v.passed for v in judge.judge_many(different))),
            ("judge_many, all identical", lambda: sum(v.passed for v in judge.judge_many(codes * each))),
            ("sequence, no protection", lambda: in_sequence(different))):
        start = time.perf_counter()
        passed = work()
        print(f"{name:28s} {time.perf_counter() - start:6.1f} s   {passed} pass")


if __name__ == "__main__":
    main()
