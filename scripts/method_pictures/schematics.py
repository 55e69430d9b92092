"""Schematics: three pieces of a network and the loss, and which signals go where."""

from __future__ import annotations

from collections.abc import Callable

from method_pictures.svg import GREY, Picture, Point, colour_of

TOP, TALL, WIDE = 130, 50, 110  # of the pieces
LEFTS = (50, 225, 400)
LOSS = (600, TOP)
EXACT, PREDICTED = 2.5, 2.0  # widths of arrows
DASH, DOTS = "7 5", "2 3"
LOW, HIGH = 294, 244  # the line of words, with and without signals below the network
INSTEAD = "what stands for it"
HEADS, TANGENTS = 5, 78  # upper ends of pictures with heads, and with tangents


def middle_of(piece: int) -> float:
    return LEFTS[piece] + WIDE / 2


def end_of(piece: int) -> Point:
    """Where the output of a piece leaves it."""
    return LEFTS[piece] + WIDE, TOP + TALL / 2


class Schematic(Picture):
    """The network itself; methods add their signals."""

    def __init__(
        self,
        name: str,
        title: str,
        sent: str,
        pieces: str = "piece",
        top: float = 110,
        foot: float = LOW,
        dead: int = 0,
    ) -> None:
        """`top` and `foot` are the upper end of the picture and the line of its words; the first `dead` pieces rest."""
        super().__init__(720, foot + 32 - top, title, top)
        self.key, self.words = 0, foot + 24
        self.colour = colour_of(name)
        for piece, left in enumerate(LEFTS):
            self.box((left, TOP), (WIDE, TALL), GREY, 0.08, DASH if piece < dead else "")
            self.text((left + WIDE / 2, TOP + 30), f"{pieces} {piece + 1}", anchor="middle", bold=True)
            before = LEFTS[piece - 1] + WIDE if piece else 0
            self.arrow([(before + 4, TOP + TALL / 2), (left - 4, TOP + TALL / 2)], GREY, 1.5)
        self.arrow([(LEFTS[2] + WIDE + 4, TOP + TALL / 2), (LOSS[0] - 4, TOP + TALL / 2)], GREY, 1.5)
        self.box(LOSS, (80, TALL), GREY)
        self.text((LOSS[0] + 40, TOP + 30), "loss", anchor="middle", bold=True)
        self.text((0, TOP + 14), "x", size=14)
        self.text((0, foot), f"Sent back through the network: {sent}", self.colour, bold=True)
        self.explain("forward")
        self.explain("gradient of the loss", self.colour, EXACT)

    def explain(self, words: str, colour: str = GREY, width: float = 1.5, dash: str = "") -> None:
        """One more entry of the row that says what arrows mean."""
        self.arrow([(self.key, self.words - 5), (self.key + 28, self.words - 5)], colour, width, dash)
        self.text((self.key + 36, self.words), words, size=13)
        self.key += 60 + 7 * len(words)

    def back(self, start: int, end: int | None = None) -> None:
        """An exact derivative from a piece, or from the loss (3), to the one below it."""
        end = start - 1 if end is None else end
        x0 = LOSS[0] + 30 if start == 3 else middle_of(start) - 8
        y = TOP + TALL
        self.arrow(
            [(x0, y + 4), (x0, y + 24), (middle_of(end) + 8, y + 24), (middle_of(end) + 8, y + 5)], self.colour, EXACT
        )

    def fed(self, to: Point, label: str, depth: float, dash: str = DASH) -> None:
        """The output error, through a matrix, straight to a place."""
        x0, y0 = LOSS[0] + 52, TOP + TALL + 4
        y = TOP + TALL + depth
        self.arrow([(x0, y0), (x0, y), (to[0], y), to], self.colour, PREDICTED, dash)
        self.text((to[0] + 10, y - 6), label, self.colour, size=13, bold=True)

    def hop(self, start: Point) -> None:
        """Back through piece 2 to piece 1, from a gradient at the end of piece 2."""
        x, y = middle_of(0) + 8, TOP + TALL
        self.arrow([start, (x, start[1]), (x, y + 5)], self.colour, PREDICTED, DASH)
        self.text((x + 10, start[1] - 6), "through 2", self.colour, size=13)

    def tangents(self, words: str) -> None:
        """Directions at the outputs of the pieces, carried forward to the outputs of the network."""
        for piece in (0, 1, 2):
            x, y = end_of(piece)[0] + 14, TOP + TALL / 2 - 9
            self.arrow([(x, TOP - 24), (x, y - 2)], GREY, 1.5, DOTS)
            self.text((x - 6, TOP - 12), "y", anchor="end", size=13, bold=True)
            after = LOSS[0] if piece == 2 else LEFTS[piece + 1]
            self.arrow([(x, y), (after - 4, y)], GREY, 1.5, DOTS)
        self.text((end_of(0)[0] + 14, TOP - 32), words, size=13)
        self.explain("tangent", GREY, 1.5, DOTS)

    def head(self, piece: int, label: str, loss: str = "loss", dash: str = "", own: bool = True) -> None:
        """A small network above the end of a piece, with a loss of its own or not."""
        x = LEFTS[piece] + WIDE - 34
        self.box((x, 62), (88, 34), self.colour, 0.15, dash)
        self.text((x + 44, 84), label, self.colour, "middle", size=13)
        self.arrow([(x + 70, TOP + TALL / 2 - 4), (x + 70, 100)], GREY, 1.2)
        if own:
            self.text((x + 44, 30), loss, self.colour, "middle", size=13, bold=True)
            self.arrow([(x + 58, 60), (x + 58, 36)], GREY, 1.2)
            self.arrow([(x + 30, 36), (x + 30, 59)], self.colour, PREDICTED, DASH)

    def down(self, piece: int) -> None:
        """From a head to its own piece."""
        x = LEFTS[piece] + WIDE - 16
        self.arrow([(x, 98), (x, TOP - 3)], self.colour, PREDICTED, DASH)


def _backprop() -> Schematic:
    s = Schematic(
        "backprop",
        "Backpropagation: the derivative of the loss goes back through every piece",
        "everything",
        "layer",
        foot=HIGH,
    )
    for start in (3, 2, 1):
        s.back(start)
    return s


def _checkpointed() -> Schematic:
    s = Schematic(
        "checkpointed",
        "Checkpoints: backpropagation that computes pieces again",
        "everything; pieces are computed again",
        top=70,
        foot=HIGH + 22,
    )
    for start in (3, 2, 1):
        s.back(start)
    for piece in (0, 1):
        x, y = LEFTS[piece], TOP - 8
        s.arrow([(x + 10, y), (x + WIDE - 10, y)], s.colour, 1.5, DASH, bend=-44)
        s.text((x + WIDE / 2, TOP - 38), "once more", s.colour, "middle", size=13)
    for piece in (0, 1, 2):
        s.dots([(LEFTS[piece] - 22, TOP + TALL / 2)], s.colour, 12, 1)
    s.dots([(56, 232)], s.colour, 12, 1)
    s.text((68, 237), "kept until it is needed", size=13)
    return s


def _frozen() -> Schematic:
    s = Schematic(
        "frozen",
        "A control: only the last piece is trained",
        "nothing; pieces 1 and 2 stay as they are",
        foot=HIGH,
        dead=2,
    )
    s.back(3)
    return s


def _direct(name: str, title: str, labels: tuple[str, str], sent: str, words: str = "") -> Schematic:
    s = Schematic(name, title, sent, "layer", TANGENTS if words else 110)
    s.back(3)
    s.fed((middle_of(1), TOP + TALL + 4), labels[1], 52)
    s.fed((middle_of(0), TOP + TALL + 4), labels[0], 82)
    s.text((LOSS[0] + 58, TOP + TALL + 44), "error e", s.colour, size=13, bold=True)
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    if words:
        s.tangents(words)
    return s


def _chained() -> Schematic:
    s = Schematic(
        "feedback-chained",
        "Feedback, chained: a prediction at the layer above, pulled back over one layer",
        "one hop, through the layer above and no further",
        "layer",
        TANGENTS,
    )
    s.back(3)
    s.back(2)
    low = TOP + TALL + 56
    s.fed((middle_of(1) + 60, low), "", 82)
    s.text((middle_of(1) + 68, low + 20), "h₂ = B₂ e, predicted", s.colour, size=13, bold=True)
    s.dots([(middle_of(1) + 60, low)], s.colour, 10, 1)
    s.hop((middle_of(1) + 52, low))
    s.text((LOSS[0] + 58, TOP + TALL + 44), "error e", s.colour, size=13, bold=True)
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    s.tangents("tangents of directions y teach B")
    return s


def _heads(name: str, title: str, label: str, loss: str) -> Schematic:
    s = Schematic(name, title, "nothing; each piece has a loss of its own", top=HEADS, foot=HIGH)
    s.back(3)
    for piece in (0, 1):
        s.head(piece, label, loss)
        s.down(piece)
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    return s


def _students(name: str, title: str, sent: str, dash: str = "", words: str = "") -> Schematic:
    s = Schematic(name, title, sent, top=HEADS, foot=TANGENTS if words else HIGH)
    s.back(3)
    for piece in (0, 1):
        s.head(piece, "student", "its loss", dash)
        s.down(piece)
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    if words:
        s.tangents(words)
    return s


def _students_chained() -> Schematic:
    s = Schematic(
        "students-chained",
        "Students, chained: what a student says is pulled back through the piece below it",
        "one hop, through the piece above and no further",
        top=HEADS,
    )
    s.back(3)
    s.back(2)
    s.head(1, "student", "its loss")
    x = LEFTS[1] + WIDE - 16
    s.line([(x, 98), (x, TOP + TALL + 56)], s.colour, PREDICTED, DASH)
    s.hop((x, TOP + TALL + 56))
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    return s


def _students_error() -> Schematic:
    s = Schematic(
        "students-error",
        "Students, error: the exact error at the outputs goes back through each student",
        "nothing; the output error goes to every student",
        top=HEADS,
        foot=HIGH,
    )
    s.back(3)
    for piece in (0, 1):
        s.head(piece, "student", own=False)
        s.down(piece)
        x = LEFTS[piece] + WIDE + 10
        s.arrow([(LOSS[0] + 40, TOP - 4), (LOSS[0] + 40, 34), (x, 34), (x, 58)], s.colour, EXACT)
    s.explain(INSTEAD, s.colour, PREDICTED, DASH)
    s.text((LOSS[0] + 48, 60), "error e", s.colour, size=13, bold=True)
    return s


SCHEMATICS: dict[str, Callable[[], Schematic]] = {
    "backprop": _backprop,
    "checkpointed": _checkpointed,
    "frozen": _frozen,
    "feedback-direct": lambda: _direct(
        "feedback-direct",
        "Feedback, direct: a learned matrix takes the output error to every layer",
        ("B₁ e, predicted", "B₂ e, predicted"),
        "nothing; the output error goes straight to every layer",
        "tangents of directions y teach B",
    ),
    "feedback-chained": _chained,
    "dfa": lambda: _direct(
        "dfa",
        "DFA: a random matrix takes the output error to every layer",
        ("B₁ e, B₁ random", "B₂ e, B₂ random"),
        "nothing; the output error goes straight to every layer",
    ),
    "fdfa": lambda: _direct(
        "fdfa",
        "FDFA: a matrix that follows the mean Jacobian takes the output error to every layer",
        ("B₁ e, predicted", "B₂ e, predicted"),
        "nothing; the output error goes straight to every layer",
        "tangents of white noise y: B is their running mean",
    ),
    "local-linear": lambda: _heads(
        "local-linear", "Local losses: a linear head at every cut trains the piece below it", "linear", "loss"
    ),
    "local-predsim": lambda: _heads(
        "local-predsim", "Local losses that predict and compare", "2 heads", "predict, compare"
    ),
    "students": lambda: _students(
        "students",
        "Students: a small network at every cut stands for all above it",
        "nothing; each piece has a student",
    ),
    "students-chained": _students_chained,
    "students-error": _students_error,
    "students-tangents": lambda: _students(
        "students-tangents",
        "Students, loss and tangents: a tangent pass teaches each student the Jacobian above its cut",
        "nothing; each piece has a student",
        words="tangents of directions y teach the students",
    ),
    "students-random": lambda: _students(
        "students-random",
        "A control: students that are never trained",
        "nothing; students stay as they were made",
        DASH,
    ),
}
