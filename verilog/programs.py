"""Write the two programs that judge an answer: the exam, which holds it, and the marking.

The exam is the problem's own testbench, with the answer, without the reference, and with a listener
beside the answer (exam.sv) that notes its outputs. So what happens inside a time step happens in the
testbench's own order: a clock that changes before the data does so here, too. The marking is
testbench and reference, and a module that replays those notes in the answer's place (marking.sv).

An answer shares the exam with the testbench, so all that could be reached by name there has a name
that it can't know: every scope of the testbench ends in `SECRET`, which is drawn for each exam.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verilog.problems import Problem

SECRET = "@secret@"  # stands in an exam's text where letters are drawn for each answer

_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_SCALE = re.compile(r"`timescale\s+\d+\s*[munpf]?s\s*/\s*(\d+)\s*([munpf]?s)")
_UNITS = ("s", "ms", "us", "ns", "ps", "fs")
_PORT = re.compile(r'\.port_info \d+ /(\w+) (\d+) "((?:[^"\\]|\\.)*)"')
_SCOPE = re.compile(r'^(S_\w+) \.scope \w+, "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)"'
                    r"[^\n]*?(?:, (S_\w+))?;$", re.MULTILINE)
_INSTANCE = re.compile(r"\bTopModule\b\s*(?:#\s*\([^;]*?\)\s*)?\w+\s*\(([^;]*)\)\s*;")


class Port(NamedTuple):
    """One port of TopModule."""

    direction: str  # INPUT, OUTPUT or INOUT
    width: int
    name: str


@dataclass(frozen=True)
class Ports:
    """The ports of TopModule, in the order of the header, and the words that the programs need."""

    every: tuple[Port, ...]

    @property
    def inputs(self) -> list[Port]:
        """The ports that the testbench drives."""
        return [port for port in self.every if port.direction == "INPUT"]

    @property
    def outputs(self) -> list[Port]:
        """All others."""
        return [port for port in self.every if port.direction != "INPUT"]

    def header(self, input_word: str, output_word: str) -> str:
        """The header's list: `header("input", "output reg")` for `input [0:0] a, output reg ...`."""
        declared = []
        for port in self.every:
            word = input_word if port.direction == "INPUT" else output_word
            declared.append(f"{word} [{port.width - 1}:0] {port.name}")
        return ", ".join(declared)


def _names(ports: list[Port], otherwise: str, separator: str = ", ") -> str:
    """The ports' names in one text; `otherwise` where there is none."""
    return separator.join(port.name for port in ports) or otherwise


def _total(ports: list[Port]) -> int:
    """How many bits the ports have together, and at least 1."""
    return max(1, sum(port.width for port in ports))


def _without_comments(text: str) -> str:
    """Verilog without comments; texts in quotes stay."""
    return _COMMENT_OR_TEXT.sub(lambda match: match[0] if match[0][0] == '"' else " ", text)


def _code_alone(text: str) -> str:
    """Verilog without comments and without texts in quotes."""
    return _COMMENT_OR_TEXT.sub(" ", text)


# ---- What the problem's files say ----

def reference_ports(program: str) -> tuple[Port, ...]:
    """The ports of RefModule in a compiled program; () where there is no RefModule."""
    scope = re.search(r'^S_\w+ \.scope module, "[^"]*" "RefModule".*?(?=^S_|\Z)', program,
                      re.MULTILINE | re.DOTALL)
    if not scope:
        return ()
    return tuple(Port(direction, int(width), name)
                 for direction, width, name in _PORT.findall(scope[0]))


def connected_ports(testbench: str) -> list[str] | None:
    """The names of the ports that a testbench connects; None for `.*` or a list without names."""
    instance = _INSTANCE.search(_code_alone(testbench))
    text = instance[1] if instance else ""
    if "." not in text or re.search(r"\.\s*\*", text):
        return None
    without_values = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", text)
    return re.findall(r"\.\s*(\w+)", without_values)


def tested_ports(testbench: str, reference: tuple[Port, ...]) -> Ports:
    """The ports that are tested, in the order of the testbench's connections.

    A port that the reference doesn't have counts as an output of one bit.
    """
    names = connected_ports(testbench)
    if names is None:
        return Ports(reference)
    known = {port.name: port for port in reference}
    return Ports(tuple(known.get(name, Port("OUTPUT", 1, name)) for name in names))


def scope_names(program: str) -> set[str]:
    """All names in a compiled program by which something of the testbench could be reached.

    These are its modules, instances, tasks, functions and named blocks, and what it declares outside
    of modules. What lies inside of RefModule and TopModule isn't the testbench's.
    """
    scopes = {label: (name, kind, parent) for label, name, kind, parent in _SCOPE.findall(program)}

    def inside_of_a_module_under_test(label: str) -> bool:
        while label in scopes:
            _, kind, label = scopes[label]
            if kind in ("RefModule", "TopModule"):
                return True
        return False

    names = set()
    for name, kind, parent in scopes.values():
        if not inside_of_a_module_under_test(parent):
            names.update((name.partition("[")[0], kind.partition("[")[0]))
    unit = re.search(r'^S_\w+ \.scope package, "\$unit".*?(?=^S_|\Z)', program,
                     re.MULTILINE | re.DOTALL)
    if unit:
        names.update(re.findall(r'^\S+ \.(?:var|net|param)\S* +\*?"(\w+)', unit[0], re.MULTILINE))
    return {name for name in names if name and not name.startswith("$")} - {"TopModule"}


# ---- The programs ----

def _unit(problem: Problem) -> str:
    """The declaration of the finest time unit that the problem's files name."""
    units = []
    for number, unit in _SCALE.findall(problem.testbench + problem.reference):
        units.append((_UNITS.index(unit), -int(number), number + unit))
    if not units:
        return ""
    finest = max(units)[2]
    return f" timeunit {finest}; timeprecision {finest};"


@functools.cache
def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _filled(name: str, problem: Problem, ports: Ports) -> str:
    """A template of this folder with the words of one problem."""
    inputs, outputs = ports.inputs, ports.outputs
    words = {
        "unit": _unit(problem),
        "ports": ports.header("input", "output reg"),
        "listening": ports.header("input", "input"),
        "ins": _names(inputs, "no_input_"), "inputs": _names(inputs, "no_input_", " or "),
        "outs": _names(outputs, "1'b0"), "outputs": _names(outputs, "no_input_", " or "),
        "anything": _names(inputs + outputs, "no_input_", " or "),
        "wide": _total(inputs) - 1, "many": _total(outputs) - 1, "secret": SECRET}
    return re.sub(r"@(\w+)@", lambda match: str(words[match[1]]), _template(name))


def marking(problem: Problem, ports: Ports) -> str:
    """The module that stands in the answer's place when testbench and reference mark its outputs."""
    return _filled("marking.sv", problem, ports)


def empty_answer(ports: Ports) -> str:
    """A TopModule that does nothing."""
    return f"module TopModule({ports.header('input', 'output')}); endmodule\n"


def exam(problem: Problem, testbench: str, ports: Ports, scopes: set[str]) -> str:
    """All of an exam but the answer: testbench, listener, and an empty reference.

    Args:
      testbench: the problem's, after the preprocessor: no macro of it may reach the answer.
      scopes: names that end in `SECRET` here, see `scope_names`.
    """
    testbench = _with_listener(_without_comments(testbench))
    reference = f"module RefModule({ports.header('input', 'output')}); endmodule\n"
    names = (scopes | {"RefModule"}) - {port.name for port in ports.every}
    hidden = renamed(testbench + "\n" + reference, names)
    hidden = _with_own_random_numbers(hidden)
    # An answer that names one of these modules has the names that verilog-eval's compiler knows.
    modules = re.findall(r"\bmodule\s+(\w+)", _code_alone(problem.testbench + problem.reference))
    taken = [f"module {name}; endmodule\n" for name in sorted({*modules} - {"TopModule"})]
    return hidden + _filled("exam.sv", problem, ports) + "".join(taken) + "`resetall\n"


def _with_listener(testbench: str) -> str:
    """A testbench that connects the listener as it connects the answer."""
    instance = _INSTANCE.search(testbench)
    if not instance:
        return testbench
    listener = f" Recorder{SECRET} recorder{SECRET} ({instance[1]});"
    return testbench[:instance.end()] + listener + testbench[instance.end():]


def renamed(text: str, names: set[str]) -> str:
    """Verilog in which all `names` end in `SECRET`, outside of texts in quotes."""
    if not names:
        return text
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"{_TEXT}|(?<![\w$'])(?:{listed})(?![\w$])")
    return pattern.sub(lambda match: match[0] if match[0][0] == '"' else match[0] + SECRET, text)


def _with_own_random_numbers(testbench: str) -> str:
    """A testbench whose random numbers stay the same when an answer draws some, too.

    Icarus's $random and $urandom start from the seed 0, one for each, and all modules share them.
    ($urandom_range takes no seed: a testbench with it keeps the common ones.)
    """
    if "$urandom_range" in testbench:
        return testbench
    text = testbench
    for call in ("random", "urandom"):
        text = re.sub(rf"\${call}\b(?:\s*\(\s*\))?(?!\s*\()", f"${call}({call}{SECRET})", text)
    return f"integer random{SECRET} = 0, urandom{SECRET} = 0;\n{text}"
