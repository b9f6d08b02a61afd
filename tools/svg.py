"""A small pen for SVG files that read on a light page, on a dark one, and on a phone.

`tools/drawings.py` and `tools/snapshots.py` draw with it. Every sheet brings its own background, so
it's readable whatever the page behind it looks like. Colours are the light ones; where a browser
says that its reader prefers dark pages, a style block swaps them; where a page takes style blocks
away, attributes have the light ones. Grey is mostly what is frozen or only read, blue what is
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


class Colour(NamedTuple):
    """One colour on one kind of page: of a surface, of its edge and of lines, of words."""

    fill: str
    edge: str
    words: str


# Okabe and Ito's set (jfly.uni-koeln.de/color), lighter for surfaces and darker for words.
LIGHT = {
    "ink": Colour("#FFFFFF", "#1F2328", "#1F2328"),
    "soft": Colour("#FFFFFF", "#6E7781", "#57606A"),
    "grey": Colour("#E7EAEE", "#8A929B", "#57606A"),
    "blue": Colour("#D6E8F5", "#0072B2", "#005A8E"),
    "orange": Colour("#FBE6BE", "#C27C00", "#8A5800"),
    "green": Colour("#CFEEE2", "#009E73", "#00714F"),
    "purple": Colour("#F3DDEA", "#B5578F", "#8C3B6C"),
    "red": Colour("#FBDDCC", "#D55E00", "#943F00"),
    "page": Colour("#FFFFFF", "#D0D7DE", "#1F2328"),
}
DARK = {
    "ink": Colour("#161B22", "#E6EDF3", "#E6EDF3"),
    "soft": Colour("#161B22", "#8B949E", "#A9B3BD"),
    "grey": Colour("#2D333B", "#768390", "#A9B3BD"),
    "blue": Colour("#0F3A57", "#56B4E9", "#8CCBF0"),
    "orange": Colour("#553B07", "#E69F00", "#F2C14E"),
    "green": Colour("#0C4636", "#2CC79B", "#5FDDB8"),
    "purple": Colour("#4C2A40", "#D98BB9", "#EBB0D3"),
    "red": Colour("#5A2B10", "#F08A4B", "#F7B083"),
    "page": Colour("#161B22", "#30363D", "#E6EDF3"),
}


class Sheet:
    """One drawing: shapes are added one by one, `text` is the file.

    Coordinates are in units of which WIDTH are the whole width, x to the right and y down.
    """

    def __init__(self, name: str, height: float, title: str, description: str) -> None:
        """An empty sheet.

        Args:
          name: the file's, without `.svg`; it also keeps this sheet's styles apart from a page's.
          height: in units.
          title, description: what a reader who can't see the drawing is told.
        """
        self.name = name
        self.height = height
        self.head = [f'<title id="{name}-title">{escape(title)}</title>',
                     f'<desc id="{name}-desc">{escape(description)}</desc>']
        self.body: list[str] = []
        self.rules: list[str] = []  # CSS beside that of the colours
        self.rectangle(0.5, 0.5, WIDTH - 1, height - 1, "page", radius=12)

    def add(self, element: str) -> None:
        """Put an SVG element of your own on the sheet."""
        self.body.append(element)

    def _shape(self, tag: str, attributes: Attributes) -> None:
        """Put an element without content on the sheet."""
        written = _written(attributes)
        self.add(f"<{tag} {written}/>")

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str = "ink",
                  radius: float = 4, line: float = 1.5, dashed: bool = False) -> None:
        """A filled rectangle with an edge of width `line`; with 0 it has none."""
        attributes: Attributes = {
            "x": x,
            "y": y,
            "width": width,
            "height": height,
            "rx": radius,
            "class": colour,
            "stroke-width": line}
        if dashed:
            attributes |= DASHES
        self._shape("rect", attributes)

    def outline(self, x: float, y: float, width: float, height: float, colour: str = "soft",
                radius: float = 4, line: float = 1.5, dashed: bool = True) -> None:
        """An edge alone: what lies below stays visible."""
        look = f"{colour}-line"
        self.rectangle(x, y, width, height, look, radius, line, dashed)

    def circle(self, x: float, y: float, radius: float, colour: str, line: float = 1.5) -> None:
        """A filled circle around (x, y)."""
        attributes: Attributes = {
            "cx": x,
            "cy": y,
            "r": radius,
            "class": colour,
            "stroke-width": line}
        self._shape("circle", attributes)

    def words(self, x: float, y: float, text: str, size: float = 17, colour: str = "ink",
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
            "class": f"{colour}-words"}
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

    def line(self, points: Sequence[Point], colour: str = "ink", width: float = 2,
             dashed: bool = False) -> None:
        """A line through several points."""
        stops = [f"{x:g} {y:g}" for x, y in points]
        attributes: Attributes = {
            "d": "M" + "L".join(stops),
            "class": f"{colour}-line",
            "stroke-width": width,
            "stroke-linejoin": "round"}
        if dashed:
            attributes |= DASHES
        self._shape("path", attributes)

    def arrow(self, points: Sequence[Point], colour: str = "ink", width: float = 2,
              dashed: bool = False) -> None:
        """A line with a head at its last point; its last piece is horizontal or vertical."""
        *_, before, tip = points
        end, left, right = _head(before, tip, width)
        self.line([*points[:-1], end], colour, width, dashed)
        corners = [f"{x:g},{y:g}" for x, y in (tip, left, right)]
        self._shape("polygon", {
            "points": " ".join(corners),
            "class": f"{colour}-solid"})

    def cells(self, x: float, y: float, colours: Sequence[Sequence[str]], size: float = 26,
              labels: Sequence[Sequence[str]] | None = None) -> None:
        """A matrix as a grid of squares.

        Args:
          x, y: its upper left corner.
          colours: of each row from the top, of each cell from the left.
          size: of a cell.
          labels: a letter for each cell, for those who can't tell the colours apart.
        """
        for row, names in enumerate(colours):
            top = y + row * size
            for column, colour in enumerate(names):
                left = x + column * size
                label = labels[row][column] if labels else ""
                self._cell(left, top, size, colour, label)

    def _cell(self, left: float, top: float, size: float, colour: str, label: str) -> None:
        """One square of `cells`."""
        self.rectangle(left, top, size, size, colour, radius=0, line=1.2)
        if label:
            middle = left + size / 2
            baseline = top + size / 2 + 6
            self.words(middle, baseline, label, 16, colour, "middle")

    def text(self) -> str:
        """The SVG file."""
        drawn = "\n".join(self.body)
        used = set(re.findall(r'class="([\w-]+)"', drawn))
        light = _looks(LIGHT)
        for look, properties in light.items():
            if look in used:  # the light colours as attributes, too
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
            "width": WIDTH,
            "height": height,
            "viewBox": f"0 0 {WIDTH} {height}",
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


def _looks(colours: Mapping[str, Colour]) -> dict[str, dict[str, str]]:
    """{class: {property: value}}: every colour as a surface, a line, a solid and words."""
    looks = {}
    for name, colour in colours.items():
        looks[name] = {"fill": colour.fill, "stroke": colour.edge}
        looks[f"{name}-line"] = {"fill": "none", "stroke": colour.edge}
        looks[f"{name}-solid"] = {"fill": colour.edge}
        looks[f"{name}-words"] = {"fill": colour.words}
    return looks


def _rule(name: str, look: str, properties: Mapping[str, str]) -> str:
    """A line of CSS that holds inside one drawing only."""
    pairs = [f"{key}: {value}" for key, value in properties.items()]
    values = "; ".join(pairs)
    return f"#{name} .{look} {{ {values} }}"
