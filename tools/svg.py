"""A small pen for SVG files that read on a light page, on a dark one, and on a phone.

`tools/drawings.py` and `tools/snapshots.py` draw with it. Every sheet brings its own background, so
it's readable whatever the page behind it looks like. Colors are the light ones; where a browser
says that its reader prefers dark pages, a style block swaps them; where a page takes style blocks
away, attributes have the light ones. Gray is mostly what is frozen or only read, blue what is
trained or ours, green a result.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

Point = tuple[float, float]
Attributes = dict[str, str | float]  # of an SVG element, in the order in which they're written
DASHES: Attributes = {"stroke-dasharray": "6 5"}
SMALLEST = 16.0  # size of the smallest words on a sheet of WIDTH: 7 pixels on a phone of 380
WIDTH = 900
SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'Liberation Mono', monospace"


class Color(NamedTuple):
    """One color on one kind of page: of a surface, of its edge and of lines, of words."""

    fill: str
    edge: str
    words: str


# Okabe and Ito's set (jfly.uni-koeln.de/color), lighter for surfaces and darker for words.
LIGHT = {
    "ink": Color("#FFFFFF", "#1F2328", "#1F2328"),
    "soft": Color("#FFFFFF", "#6E7781", "#57606A"),
    "gray": Color("#E7EAEE", "#8A929B", "#57606A"),
    "blue": Color("#D6E8F5", "#0072B2", "#005A8E"),
    "orange": Color("#FBE6BE", "#C27C00", "#8A5800"),
    "green": Color("#CFEEE2", "#009E73", "#00714F"),
    "purple": Color("#F3DDEA", "#B5578F", "#8C3B6C"),
    "red": Color("#FBDDCC", "#D55E00", "#943F00"),
    "page": Color("#FFFFFF", "#D0D7DE", "#1F2328"),
}
DARK = {
    "ink": Color("#161B22", "#E6EDF3", "#E6EDF3"),
    "soft": Color("#161B22", "#8B949E", "#A9B3BD"),
    "gray": Color("#2D333B", "#768390", "#A9B3BD"),
    "blue": Color("#0F3A57", "#56B4E9", "#8CCBF0"),
    "orange": Color("#553B07", "#E69F00", "#F2C14E"),
    "green": Color("#0C4636", "#2CC79B", "#5FDDB8"),
    "purple": Color("#4C2A40", "#D98BB9", "#EBB0D3"),
    "red": Color("#5A2B10", "#F08A4B", "#F7B083"),
    "page": Color("#161B22", "#30363D", "#E6EDF3"),
}


class Sheet:
    """One drawing: shapes are added one by one, `text` is the file.

    Coordinates are in units, x to the right and y down; a sheet is WIDTH units wide or narrower.
    """

    def __init__(self, name: str, height: float, title: str, description: str,
                 width: int = WIDTH) -> None:
        """An empty sheet.

        Args:
          name: the file's, without `.svg`; it also keeps this sheet's styles apart from a page's.
          height: in units.
          title, description: what a reader who can't see the drawing is told.
          width: in units. Words on a narrow sheet are larger on a phone.
        """
        self.name = name
        self.height = height
        self.width = width
        self.head = [f'<title id="{name}-title">{escape(title)}</title>',
                     f'<desc id="{name}-desc">{escape(description)}</desc>']
        self.body: list[str] = []
        self.rules: list[str] = []  # CSS beside that of the colors
        self.rectangle(0.5, 0.5, width - 1, height - 1, "page", radius=12)

    def add(self, element: str) -> None:
        """Put an SVG element of your own on the sheet."""
        self.body.append(element)

    def _shape(self, tag: str, attributes: Attributes) -> None:
        """Put an element without content on the sheet."""
        written = _written(attributes)
        self.add(f"<{tag} {written}/>")

    def rectangle(self, x: float, y: float, width: float, height: float, color: str = "ink",
                  radius: float = 4, line: float = 1.5, dashed: bool = False) -> None:
        """A filled rectangle with an edge of width `line`; with 0 it has none."""
        attributes: Attributes = {
            "x": x,
            "y": y,
            "width": width,
            "height": height,
            "rx": radius,
            "class": color,
            "stroke-width": line}
        if dashed:
            attributes |= DASHES
        self._shape("rect", attributes)

    def outline(self, x: float, y: float, width: float, height: float, color: str = "soft",
                radius: float = 4, line: float = 1.5, dashed: bool = True) -> None:
        """An edge alone: what lies below stays visible."""
        look = f"{color}-line"
        self.rectangle(x, y, width, height, look, radius, line, dashed)

    def circle(self, x: float, y: float, radius: float, color: str, line: float = 1.5) -> None:
        """A filled circle around (x, y)."""
        attributes: Attributes = {
            "cx": x,
            "cy": y,
            "r": radius,
            "class": color,
            "stroke-width": line}
        self._shape("circle", attributes)

    def words(self, x: float, y: float, text: str, size: float = 17, color: str = "ink",
              anchor: str = "start", bold: bool = False, mono: bool = False) -> None:
        """One line of text.

        Args:
          x, y: where its baseline begins, has its middle, or ends, as `anchor` says.
          size: height of its letters, at least SMALLEST.
          anchor: start, middle or end.
          mono: for names in code, files and shapes.

        Raises:
          ValueError: the letters would be too small on a phone.
        """
        if size < SMALLEST:
            raise ValueError(f"{text!r} in size {size:g}: nothing below {SMALLEST:g} can be read")
        attributes: Attributes = {
            "x": x,
            "y": y,
            "font-size": size,
            "text-anchor": anchor,
            "class": f"{color}-words"}
        if bold:
            attributes["font-weight"] = "bold"
        if mono:
            attributes["font-family"] = MONO
        attributes["xml:space"] = "preserve"
        written = _written(attributes)
        content = escape(text, quote=False)
        self.add(f"<text {written}>{content}</text>")

    def lines(self, x: float, y: float, texts: Iterable[str], step: float = 22,
              **look: object) -> None:
        """Several lines of text below each other, `step` apart; `look` as for `words`."""
        for place, text in enumerate(texts):
            self.words(x, y + place * step, text, **look)  # type: ignore[arg-type]

    def line(self, points: Sequence[Point], color: str = "ink", width: float = 2,
             dashed: bool = False) -> None:
        """A line through several points."""
        stops = [f"{x:g} {y:g}" for x, y in points]
        attributes: Attributes = {
            "d": "M" + "L".join(stops),
            "class": f"{color}-line",
            "stroke-width": width,
            "stroke-linejoin": "round"}
        if dashed:
            attributes |= DASHES
        self._shape("path", attributes)

    def arrow(self, points: Sequence[Point], color: str = "ink", width: float = 2,
              dashed: bool = False) -> None:
        """A line with a head at its last point; its last piece is horizontal or vertical."""
        *_, before, tip = points
        end, left, right = _head(before, tip, width)
        self.line([*points[:-1], end], color, width, dashed)
        corners = [f"{x:g},{y:g}" for x, y in (tip, left, right)]
        self._shape("polygon", {
            "points": " ".join(corners),
            "class": f"{color}-solid"})

    def cells(self, x: float, y: float, colors: Sequence[Sequence[str]], size: float = 26,
              labels: Sequence[Sequence[str]] | None = None) -> None:
        """A matrix as a grid of squares.

        Args:
          x, y: its upper left corner.
          colors: of each row from the top, of each cell from the left.
          size: of a cell.
          labels: a letter for each cell, for those who can't tell the colors apart.
        """
        for row, names in enumerate(colors):
            top = y + row * size
            for column, color in enumerate(names):
                left = x + column * size
                label = labels[row][column] if labels else ""
                self._cell(left, top, size, color, label)

    def _cell(self, left: float, top: float, size: float, color: str, label: str) -> None:
        """One square of `cells`."""
        self.rectangle(left, top, size, size, color, radius=0, line=1.2)
        if label:
            middle = left + size / 2
            baseline = top + size / 2 + 6
            self.words(middle, baseline, label, 16, color, "middle")

    def text(self) -> str:
        """The SVG file."""
        drawn = "\n".join(self.body)
        used = set(re.findall(r'class="([\w-]+)"', drawn))
        light = _looks(LIGHT)
        for look, properties in light.items():
            if look in used:  # the light colors as attributes, too
                plain = _written(properties)
                drawn = drawn.replace(f'class="{look}"', f'class="{look}" {plain}')

        lines = [
            self._opening(),
            *self.head,
            "<style>",
            *self._rules(light, used),
            *self.rules,
            "@media (prefers-color-scheme: dark) {",
            *self._rules(_looks(DARK), used),
            "}",
            "</style>",
            drawn,
            "</svg>",
            ""]
        return "\n".join(lines)

    def _opening(self) -> str:
        """The tag that opens the file."""
        height = f"{self.height:g}"
        written = _written({
            "xmlns": "http://www.w3.org/2000/svg",
            "id": self.name,
            "width": self.width,
            "height": height,
            "viewBox": f"0 0 {self.width} {height}",
            "role": "img",
            "aria-labelledby": f"{self.name}-title {self.name}-desc",
            "font-family": SANS})
        return f"<svg {written}>"

    def _rules(self, looks: Mapping[str, Mapping[str, str]], used: set[str]) -> list[str]:
        """The lines of CSS for the looks that this sheet uses."""
        rules = []
        for look, properties in looks.items():
            if look in used:
                rules.append(_rule(self.name, look, properties))
        return rules


def _written(attributes: Mapping[str, str | float]) -> str:
    """Attributes as they stand in a tag; numbers without needless digits."""
    words = []
    for name, value in attributes.items():
        text = value if isinstance(value, str) else f"{value:g}"
        words.append(f'{name}="{text}"')
    return " ".join(words)


def _head(before: Point, tip: Point, width: float) -> tuple[Point, Point, Point]:
    """Where an arrow's line ends, and the two corners beside that end; the head's third is `tip`.

    Args:
      before, tip: the ends of the arrow's last piece, which is horizontal or vertical.
      width: of its line.
    """
    x, y = tip
    before_x, before_y = before
    long = 6 + 3 * width
    wide = 3 + 1.8 * width
    if before_y == y:
        back = x - long if x > before_x else x + long
        return (back, y), (back, y - wide), (back, y + wide)
    back = y - long if y > before_y else y + long
    return (x, back), (x - wide, back), (x + wide, back)


def _looks(colors: Mapping[str, Color]) -> dict[str, dict[str, str]]:
    """{class: {property: value}}: every color as a surface, a line, a solid and words."""
    looks = {}
    for name, color in colors.items():
        looks[name] = {"fill": color.fill, "stroke": color.edge}
        looks[f"{name}-line"] = {"fill": "none", "stroke": color.edge}
        looks[f"{name}-solid"] = {"fill": color.edge}
        looks[f"{name}-words"] = {"fill": color.words}
    return looks


def _rule(name: str, look: str, properties: Mapping[str, str]) -> str:
    """A line of CSS that holds inside one drawing only."""
    pairs = [f"{key}: {value}" for key, value in properties.items()]
    values = "; ".join(pairs)
    return f"#{name} .{look} {{ {values} }}"
