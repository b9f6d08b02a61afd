"""Problems, answers, a judge and scores for Verilog, and scores for questions of your own.

    import verilog
    problem = verilog.load_problems("data/tiny_eval")[30]
    right = problem.right_answer
    verdicts = verilog.judge_many([(problem, right), (problem, right.replace("+", "-"))])
    print([verdict.category for verdict in verdicts], verilog.pass_at_k(n=2, c=1, k=1))

`asking` draws answers through a `client` of any server with /v1/completions, and saves them as they
come. `scores` turns them into scores, and `stats` has intervals and the paired comparison.
`problems.questions` takes questions that aren't Verilog, with a score of your own. You need Icarus
Verilog, and of this repository only this folder and `tables/`.
"""

from verilog.extraction import extract_code
from verilog.judging import judge, judge_many
from verilog.problems import Benchmark, load_problems, questions
from verilog.stats import compare, pass_at_k

__all__ = ["Benchmark", "compare", "extract_code", "judge", "judge_many", "load_problems",
           "pass_at_k", "questions"]
