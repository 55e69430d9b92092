"""Schematics: three pieces of a network and the loss, and which signals go where."""

from __future__ import annotations

from typing import Self

from method_pictures.svg import GREY, Picture, Point, colour_of

TOP, TALL, WIDE = 130, 50, 110  # of the pieces
LEFTS = (50, 225, 400)
LOSS = (600, TOP)
EXACT, PREDICTED = 2.5, 2.0  # widths of arrows
DASH, DOTS = "7 5", "2 3"
LOW, HIGH = 294, 244  # the line of words, with and without signals below the network
HEADS, TANGENTS = 5, 78  # upper ends of pictures with heads, and with tangents


def middle_of(piece: int) -> float:
    return LEFTS[piece] + WIDE / 2


class Schematic(Picture):
    """The network itself; methods add their signals, one after the other."""

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
        self.name, self.colour = name, colour_of(name)
        self.key, self.words = 0, foot + 24
        ends = 0
        for piece, left in enumerate(LEFTS):
            self.box((left, TOP), (WIDE, TALL), GREY, 0.08, DASH if piece < dead else "")
            self.text((left + WIDE / 2, TOP + 30), f"{pieces} {piece + 1}", anchor="middle", bold=True)
            self.arrow([(ends + 4, TOP + TALL / 2), (left - 4, TOP + TALL / 2)], GREY, 1.5)
            ends = left + WIDE
        self.arrow([(ends + 4, TOP + TALL / 2), (LOSS[0] - 4, TOP + TALL / 2)], GREY, 1.5)
        self.box(LOSS, (80, TALL), GREY)
        self.text((LOSS[0] + 40, TOP + 30), "loss", anchor="middle", bold=True)
        self.text((0, TOP + 14), "x", size=14)
        self.text((0, foot), f"Sent back through the network: {sent}", self.colour, bold=True)
        self.explain("forward").explain("gradient of the loss", self.colour, EXACT)

    def explain(self, words: str, colour: str = GREY, width: float = 1.5, dash: str = "") -> Self:
        """One more entry of the row that says what arrows mean."""
        self.arrow([(self.key, self.words - 5), (self.key + 28, self.words - 5)], colour, width, dash)
        self.text((self.key + 36, self.words), words, size=13)
        self.key += 60 + 7 * len(words)
        return self

    def instead(self) -> Self:
        return self.explain("what stands for it", self.colour, PREDICTED, DASH)

    def back(self, *starts: int) -> Self:
        """An exact derivative from each of these pieces, or from the loss (3), to the one below it."""
        for start in starts:
            x0, x1 = LOSS[0] + 30 if start == 3 else middle_of(start) - 8, middle_of(start - 1) + 8
            y = TOP + TALL
            self.arrow([(x0, y + 4), (x0, y + 24), (x1, y + 24), (x1, y + 5)], self.colour, EXACT)
        return self

    def again(self) -> Self:
        """Pieces 1 and 2 are computed once more, from what was kept at their starts."""
        for left in LEFTS[:2]:
            self.arrow([(left + 10, TOP - 8), (left + WIDE - 10, TOP - 8)], self.colour, 1.5, DASH, bend=-44)
            self.text((left + WIDE / 2, TOP - 38), "once more", self.colour, "middle", size=13)
        for place in (*((left - 22, TOP + TALL / 2) for left in LEFTS), (56, 232)):
            self.dots([place], self.colour, 12, 1)
        self.text((68, 237), "kept until it is needed", size=13)
        return self

    def fed(self, to: Point, label: str, depth: float) -> Self:
        """The output error, through a matrix, straight to a place."""
        x, y = LOSS[0] + 52, TOP + TALL
        self.arrow([(x, y + 4), (x, y + depth), (to[0], y + depth), to], self.colour, PREDICTED, DASH)
        self.text((to[0] + 10, y + depth - 6), label, self.colour, size=13, bold=True)
        return self

    def error(self) -> Self:
        self.text((LOSS[0] + 58, TOP + TALL + 44), "error e", self.colour, size=13, bold=True)
        return self.instead()

    def hop(self, start: Point) -> Self:
        """Back through piece 2 to piece 1, from a gradient at the end of piece 2."""
        x, y = middle_of(0) + 8, TOP + TALL
        self.arrow([start, (x, start[1]), (x, y + 5)], self.colour, PREDICTED, DASH)
        self.text((x + 10, start[1] - 6), "through 2", self.colour, size=13)
        return self

    def predicted(self) -> Self:
        """A prediction at the end of piece 2, and what it becomes below."""
        x, y = middle_of(1) + 60, TOP + TALL + 56
        self.fed((x, y), "", 82).text((x + 8, y + 20), "h₂ = B₂ e, predicted", self.colour, size=13, bold=True)
        self.dots([(x, y)], self.colour, 10, 1)
        return self.hop((x - 8, y))

    def tangents(self, words: str, left: float = LEFTS[0] + WIDE + 14) -> Self:
        """Directions at the outputs of the pieces, carried forward to the outputs of the network."""
        for piece, after in zip(LEFTS, (*LEFTS[1:], LOSS[0]), strict=True):
            x, y = piece + WIDE + 14, TOP + TALL / 2 - 9
            self.arrow([(x, TOP - 24), (x, y - 2)], GREY, 1.5, DOTS)
            self.text((x - 6, TOP - 12), "y", anchor="end", size=13, bold=True)
            self.arrow([(x, y), (after - 4, y)], GREY, 1.5, DOTS)
        self.text((left, TOP - 32), words, size=13)
        return self.explain("tangent", GREY, 1.5, DOTS)

    def head(self, piece: int, label: str, loss: str = "", dash: str = "") -> Self:
        """A small network above the end of a piece, with a loss of its own or not."""
        x = LEFTS[piece] + WIDE - 34
        self.box((x, 62), (88, 34), self.colour, 0.15, dash)
        self.text((x + 44, 84), label, self.colour, "middle", size=13)
        self.arrow([(x + 70, TOP + TALL / 2 - 4), (x + 70, 100)], GREY, 1.2)
        if loss:
            self.text((x + 44, 30), loss, self.colour, "middle", size=13, bold=True)
            self.arrow([(x + 58, 60), (x + 58, 36)], GREY, 1.2)
            self.arrow([(x + 30, 36), (x + 30, 59)], self.colour, PREDICTED, DASH)
        return self

    def heads(self, label: str, loss: str = "", dash: str = "") -> Self:
        """A head for each of the lower pieces, and what it says to its piece; without a loss the error goes to it."""
        for piece in (0, 1):
            x = LEFTS[piece] + WIDE - 16
            self.head(piece, label, loss, dash).arrow([(x, 98), (x, TOP - 3)], self.colour, PREDICTED, DASH)
            if not loss:
                self.arrow(
                    [(LOSS[0] + 40, TOP - 4), (LOSS[0] + 40, 34), (x + 26, 34), (x + 26, 58)], self.colour, EXACT
                )
        if not loss:
            self.text((LOSS[0] + 48, 60), "error e", self.colour, size=13, bold=True)
        return self.instead()

    def pulled(self) -> Self:
        """What the student of piece 2 says, back through that piece."""
        x, y = LEFTS[1] + WIDE - 16, TOP + TALL + 56
        self.line([(x, 98), (x, y)], self.colour, PREDICTED, DASH)
        return self.hop((x, y)).instead()


def _direct(name: str, title: str, label: str, top: float = TANGENTS) -> Schematic:
    made = Schematic(name, title, "nothing; the output error goes straight to every layer", "layer", top).back(3)
    for piece, index, depth in ((1, "₂", 52), (0, "₁", 82)):
        made.fed((middle_of(piece), TOP + TALL + 4), label.replace("₁", index), depth)
    return made.error()


def _headed(name: str, title: str, sent: str, foot: float = HIGH) -> Schematic:
    return Schematic(name, title, sent, top=HEADS, foot=foot).back(3)


def schematics() -> dict[str, Schematic]:
    """Each by the name of its method."""
    local, student = "nothing; each piece has a loss of its own", "nothing; each piece has a student"
    made = (
        Schematic("backprop", "Backpropagation: the derivative of the loss goes back through every piece", "everything",
                  "layer", foot=HIGH).back(3, 2, 1),
        Schematic("checkpointed", "Checkpoints: backpropagation that computes pieces again",
                  "everything; pieces are computed again", top=70, foot=HIGH + 22).back(3, 2, 1).again(),
        Schematic("frozen", "A control: only the last piece is trained", "nothing; pieces 1 and 2 stay as they are",
                  foot=HIGH, dead=2).back(3),
        _direct("feedback-direct", "Feedback, direct: a learned matrix takes the output error to every layer",
                "B₁ e, predicted").tangents("tangents of directions y teach B"),
        Schematic("feedback-chained", "Feedback, chained: a prediction at the layer above, pulled back over one layer",
                  "one hop, through the layer above and no further", "layer", TANGENTS)
        .back(3, 2).predicted().error().tangents("tangents of directions y teach B"),
        _direct("dfa", "DFA: a random matrix takes the output error to every layer", "B₁ e, B₁ random", 110),
        _direct("fdfa", "FDFA: a matrix that follows the mean Jacobian takes the output error to every layer",
                "B₁ e, predicted").tangents("tangents of white noise y: B is their running mean"),
        _headed("local-linear", "Local losses: a linear head at every cut trains the piece below it", local)
        .heads("linear", "loss"),
        _headed("local-predsim", "Local losses that predict and compare", local).heads("2 heads", "predict, compare"),
        _headed("students", "Students: a small network at every cut stands for all above it", student)
        .heads("student", "its loss"),
        _headed("students-chained", "Students, chained: what a student says is pulled back through the piece below it",
                "one hop, through the piece above and no further", LOW).back(2).head(1, "student", "its loss").pulled(),
        _headed("students-error", "Students, error: the exact error at the outputs goes back through each student",
                "nothing; the output error goes to every student").heads("student"),
        _headed("students-tangents",
                "Students, loss and tangents: a tangent pass teaches each student the Jacobian above its cut", student)
        .heads("student", "its loss").tangents("tangents of directions y teach the students", LEFTS[2] + 20),
        _headed("students-random", "A control: students that are never trained",
                "nothing; students stay as they were made").heads("student", "its loss", DASH),
    )  # fmt: skip
    return {one.name: one for one in made}
