"""Write the two programs that judge an answer: the exam, which holds it, and the marking.

The exam is the problem's own testbench, with the answer, without the reference, and with a listener
beside the answer (exam.sv) that notes its outputs. So what happens inside a time step happens in
the testbench's own order: where the clock changes before the data, it does so here, too. The
marking is testbench and reference, and a module that replays those notes in the answer's place
(marking.sv).

An answer shares the exam with the testbench, so whatever it could reach there by name has a name
that it can't know: every scope of the testbench ends in `SECRET`, which is drawn for each exam.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verilog.problems import Problem

SECRET = "@secret@"  # stands in an exam's text where letters are drawn for each answer

_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT_OR_TEXT = re.compile(rf"//[^\n]*|/\*.*?(?:\*/|\Z)|{_TEXT}", re.DOTALL)
_SCALE = re.compile(r"`timescale\s+\d+\s*[munpf]?s\s*/\s*(\d+)\s*([munpf]?s)")
_UNITS = ("s", "ms", "us", "ns", "ps", "fs")
_INSTANCE = re.compile(r"\bTopModule\b\s*(?:#\s*\([^;]*?\)\s*)?\w+\s*\(([^;]*)\)\s*;")
_IN_BRACKETS = re.compile(r"\((?:[^()]|\([^()]*\))*\)")

# Lines of a compiled program. A scope's text goes on until the next scope begins.
_NAME = r'"((?:[^"\\]|\\.)*)"'
_SCOPE = re.compile(rf"^(S_\w+) \.scope \w+, {_NAME} {_NAME}[^\n]*?(?:, (S_\w+))?;$", re.MULTILINE)
_REFERENCE = re.compile(r'^S_\w+ \.scope module, "[^"]*" "RefModule".*?(?=^S_|\Z)',
                        re.MULTILINE | re.DOTALL)
_UNIT = re.compile(r'^S_\w+ \.scope package, "\$unit".*?(?=^S_|\Z)', re.MULTILINE | re.DOTALL)
_PORT = re.compile(rf"\.port_info \d+ /(\w+) (\d+) {_NAME}")
_NET = re.compile(rf"^(v\S+) \.net\S* {_NAME}", re.MULTILINE)
_EVENT = re.compile(r"^E_\S+ \.event (posedge|negedge|edge|anyedge), ([^;]*);$", re.MULTILINE)
_DECLARED = re.compile(r'^\S+ \.(?:var|net|param)\S* +\*?"(\w+)', re.MULTILINE)


class Port(NamedTuple):
    """One port of TopModule."""

    direction: str  # INPUT, OUTPUT or INOUT
    width: int
    name: str

    @property
    def bits(self) -> str:
        """Its range, as a declaration has it: [7:0] for eight bits."""
        return f"[{self.width - 1}:0]"

    @property
    def is_input(self) -> bool:
        """Does the testbench drive it?"""
        return self.direction == "INPUT"


@dataclass(frozen=True)
class Ports:
    """The ports of TopModule, in the order of its header."""

    all: tuple[Port, ...]

    @property
    def inputs(self) -> list[Port]:
        """The ports that the testbench drives."""
        return [port for port in self.all if port.is_input]

    @property
    def outputs(self) -> list[Port]:
        """All others."""
        return [port for port in self.all if not port.is_input]

    def header(self, input_word: str, output_word: str) -> str:
        """The header's list: with "output reg" for outputs, `input [0:0] a, output reg [7:0] b`."""
        declared = []
        for port in self.all:
            word = output_word
            if port.is_input:
                word = input_word
            declaration = f"{word} {port.bits} {port.name}"
            declared.append(declaration)
        return ", ".join(declared)


def _names(ports: Sequence[Port]) -> list[str]:
    """The ports' names, in order."""
    return [port.name for port in ports]


def _listed(ports: Sequence[Port], otherwise: str = "no_input_") -> str:
    """The ports' names for a concatenation; `otherwise` where there is none."""
    names = _names(ports)
    if not names:
        return otherwise
    return ", ".join(names)


def _awaited(ports: Sequence[Port]) -> str:
    """What `@(...)` waits for: a change of any port; where there is none, what never changes."""
    if not ports:
        return "no_input_"
    nets = [f"heard_{port.name}_" for port in ports]
    return " or ".join(nets)


def _heard(ports: Sequence[Port]) -> str:
    """Nets that follow the ports.

    Icarus makes one event of all processes that wait for the same edge of the same net, and which
    of two processes wakes first depends on that. We wait for nets of our own, and change no order.
    """
    lines = []
    for port in ports:
        name = port.name
        line = f"wire {port.bits} heard_{name}_ = {name};"
        lines.append(line)
    return "\n  ".join(lines)


def _last_bit(ports: Sequence[Port]) -> int:
    """The number of the last bit of a vector that holds all ports, and at least one bit."""
    width = 0
    for port in ports:
        width += port.width
    return max(width, 1) - 1


def _without_comments(text: str) -> str:
    """Verilog without comments; texts in quotes stay."""
    def keep(match: re.Match) -> str:
        if match[0].startswith('"'):
            return match[0]
        return " "

    return _COMMENT_OR_TEXT.sub(keep, text)


def _code_alone(text: str) -> str:
    """Verilog without comments and without texts in quotes."""
    return _COMMENT_OR_TEXT.sub(" ", text)


# ---- What the problem's files say ----

def reference_ports(program: str) -> tuple[Port, ...]:
    """The ports of RefModule in a compiled program; () where there is no RefModule."""
    scope = _REFERENCE.search(program)
    if scope is None:
        return ()
    ports = []
    for direction, width, name in _PORT.findall(scope[0]):
        port = Port(direction, int(width), name)
        ports.append(port)
    return tuple(ports)


def reference_events(program: str, ports: tuple[Port, ...]) -> list[str]:
    """What the processes of RefModule wait for, of its inputs: ["posedge clk", "a or b"].

    An event that also waits for something inside RefModule is left out.

    Args:
      program: the compiled reference alone.
    """
    scope = _REFERENCE.search(program)
    if scope is None:
        return []
    inputs = set(_names(Ports(ports).inputs))
    reference = scope[0]
    name_of = dict(_NET.findall(reference))  # by Icarus's label of the net

    events = []
    for kind, labels in _EVENT.findall(reference):
        edge = ""
        if kind in ("posedge", "negedge"):
            edge = f"{kind} "
        names = [name_of.get(label) for label in labels.split(", ")]
        if inputs.issuperset(names):
            waits = [f"{edge}{name}" for name in names]
            events.append(" or ".join(waits))
    return events


def connected_ports(testbench: str) -> list[str] | None:
    """The names of the ports that a testbench connects; None for `.*` or a list without names."""
    instance = _INSTANCE.search(_code_alone(testbench))
    if instance is None:
        return None
    names = _IN_BRACKETS.sub("", instance[1])
    if "." not in names or re.search(r"\.\s*\*", names):
        return None
    return re.findall(r"\.\s*(\w+)", names)


def tested_ports(testbench: str, reference: tuple[Port, ...]) -> Ports:
    """The ports that are tested, in the order of the testbench's connections.

    A port that the reference doesn't have counts as an output of one bit.
    """
    names = connected_ports(testbench)
    if names is None:
        return Ports(reference)
    port_of = {port.name: port for port in reference}
    ports = []
    for name in names:
        unknown = Port("OUTPUT", 1, name)
        port = port_of.get(name, unknown)
        ports.append(port)
    return Ports(tuple(ports))


def scope_names(program: str) -> set[str]:
    """All names in a compiled program by which something of the testbench could be reached.

    These are its modules, instances, tasks, functions and named blocks, and what it declares
    outside of modules. What lies inside of RefModule and TopModule isn't the testbench's.
    """
    under_test = set()  # labels of RefModule's and TopModule's scopes, with everything below
    names = {"RefModule"}
    for label, name, module, parent in _SCOPE.findall(program):  # parents come before children
        if parent in under_test:
            under_test.add(label)
            continue
        if module in ("RefModule", "TopModule"):
            under_test.add(label)
        for text in (name, module):
            plain = text.partition("[")[0]  # `row` of `row[3]`, an instance of many
            if not plain.startswith("$"):
                names.add(plain)

    unit = _UNIT.search(program)
    if unit is not None:
        declared = _DECLARED.findall(unit[0])
        names.update(declared)
    return names - {"", "TopModule"}


# ---- The programs ----

def _unit(problem: Problem) -> str:
    """The declaration of the finest time unit that the problem's files name."""
    text = problem.testbench + problem.reference
    units = []
    for number, unit in _SCALE.findall(text):
        fineness = _UNITS.index(unit)
        size = int(number)
        name = number + unit
        units.append((fineness, -size, name))
    if not units:
        return ""
    _, _, finest = max(units)
    return f" timeunit {finest}; timeprecision {finest};"


@functools.cache
def _template(name: str) -> str:
    """The text of a template of this folder, with its marks (`@ports@`)."""
    path = Path(__file__).parent / name
    return path.read_text(encoding="utf-8")


def _filled(name: str, problem: Problem, ports: Ports) -> str:
    """A template of this folder with the words of one problem."""
    inputs = ports.inputs
    outputs = ports.outputs
    words = {
        "unit": _unit(problem),
        "ports": ports.header("input", "output reg"),
        "listening": ports.header("input", "input"),
        "ins": _listed(inputs),
        "outs": _listed(outputs, otherwise="1'b0"),
        "inputs": _awaited(inputs),
        "outputs": _awaited(outputs),
        "anything": _awaited(ports.all),
        "heard": _heard(ports.all),
        "heard_inputs": _heard(inputs),
        "wide": str(_last_bit(inputs)),
        "many": str(_last_bit(outputs)),
        "secret": SECRET,
    }

    def word_for(mark: re.Match) -> str:
        return words[mark[1]]

    template = _template(name)
    return re.sub(r"@(\w+)@", word_for, template)


def marking(problem: Problem, ports: Ports) -> str:
    """The module in the answer's place when testbench and reference mark its outputs."""
    return _filled("marking.sv", problem, ports)


def empty_answer(ports: Ports) -> str:
    """A TopModule that does nothing."""
    header = ports.header("input", "output")
    return f"module TopModule({header}); endmodule\n"


def _empty_reference(ports: Ports, events: list[str]) -> str:
    """A RefModule that wakes when the true one does, and does nothing.

    Two processes of a testbench that wait for one edge wake in an order that depends on who else
    waits for it. So this one waits, too.
    """
    header = ports.header("input", "output")
    text = f"module RefModule({header});\n  reg awake_;\n"
    for event in events:
        text += f"  always @({event}) awake_ = 1;\n"
    return f"{text}endmodule\n"


def exam(
        problem: Problem,
        testbench: str,
        ports: Ports,
        scopes: set[str],
        events: list[str]) -> str:
    """All of an exam but the answer: testbench, listener, and an empty reference.

    Args:
      testbench: the problem's, after the preprocessor: no macro of it may reach the answer.
      scopes: names that end in `SECRET` here, see `scope_names`.
      events: what the reference waits for, see `reference_events`.
    """
    plain = _without_comments(testbench)
    listened_to = _with_listener(plain)
    reference = _empty_reference(ports, events)

    whole = f"{listened_to}\n{reference}"
    known = _names(ports.all)  # an answer has to know its ports' names
    unknown = scopes.difference(known)
    hidden = renamed(whole, unknown)
    bench = _with_own_random_numbers(hidden)
    listener = _filled("exam.sv", problem, ports)
    taken = _taken_names(problem)
    return f"{bench}{listener}{taken}`resetall\n"


def _with_listener(testbench: str) -> str:
    """A testbench that connects the listener as it connects the answer."""
    instance = _INSTANCE.search(testbench)
    if instance is None:
        return testbench
    end = instance.end()
    before = testbench[:end]
    after = testbench[end:]
    connections = instance[1]
    listener = f"Recorder{SECRET} recorder{SECRET} ({connections});"
    return f"{before} {listener}{after}"


def _taken_names(problem: Problem) -> str:
    """Empty modules under the names of the problem's own.

    In verilog-eval's one program these names are taken: an answer that uses one doesn't compile.
    """
    code = _code_alone(problem.testbench + problem.reference)
    names = set(re.findall(r"\bmodule\s+(\w+)", code))
    names.discard("TopModule")
    text = ""
    for name in sorted(names):
        text += f"module {name}; endmodule\n"
    return text


def renamed(text: str, names: set[str]) -> str:
    """Verilog in which all `names` end in `SECRET`, outside of texts in quotes."""
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    listed = "|".join(map(re.escape, longest_first))
    whole_name = rf"(?<![\w$'])(?:{listed})(?![\w$])"
    pattern = re.compile(f"{_TEXT}|{whole_name}")

    def hide(match: re.Match) -> str:
        word = match[0]
        if word.startswith('"'):
            return word
        return word + SECRET

    return pattern.sub(hide, text)


def _with_own_random_numbers(testbench: str) -> str:
    """A testbench whose random numbers stay the same when an answer draws some, too.

    Icarus's $random and $urandom each start from the seed 0, and all modules share them. So the
    testbench gets seeds of its own. ($urandom_range takes none: with it, they stay shared.)
    """
    if "$urandom_range" in testbench:
        return testbench
    for call in ("random", "urandom"):
        without_seed = rf"\${call}\b(?:\s*\(\s*\))?(?!\s*\()"
        with_seed = f"${call}({call}{SECRET})"
        testbench = re.sub(without_seed, with_seed, testbench)
    return f"integer random{SECRET} = 0, urandom{SECRET} = 0;\n{testbench}"
