"""Draw the questions that lead to a strategy.

Run: python docs/figures/choosing.py
"""

from pathlib import Path

import style as s

QUESTION, ANSWER = (186, 50), (122, 50)  # points
LEFT, ACROSS, STEP, TOP = 10, 228, 84, 12

# question, what leads to the answer, answer, its colour
QUESTIONS = [
    ("Do you wait for the network?\nadvise, or sparse/ms_wait", "no", "plain DDP\nkeep it", s.GREY),
    ("Rather not choose?\n", "yes", "sparse_auto\nmeasures, chooses", s.GREEN),
    ("Is 1/8 of the bytes enough?\nagainst float32", "yes", "sparse_dense\nall, in int4", s.BLUE),
    ("Is it Adam, or long latency?\n", "yes", "2 local steps, int4;\n3 in one bit", s.PURPLE),
    ("Is 1/15 of the bytes enough?\n", "yes", "micro\n30 % in int4", s.ORANGE),
]
LAST = ("micro\n5 % in int4: 1/77", s.RED)


def draw(folder: Path = s.FOLDER) -> None:
    """Draw questions in a column and the answers beside them."""
    figure, axes = s.canvas(TOP + STEP * len(QUESTIONS) + QUESTION[1] + 10)
    for row, (question, word, answer, colour) in enumerate(QUESTIONS):
        top = TOP + STEP * row
        s.box(axes, (LEFT, top), QUESTION, question.strip("\n"), s.GREY)
        s.box(axes, (ACROSS, top), ANSWER, answer, colour)
        middle = top + QUESTION[1] / 2
        s.arrow(axes, (LEFT + QUESTION[0], middle), (ACROSS, middle))
        s.write(axes, (LEFT + QUESTION[0] + 16, middle - 9), word, s.FAINT, s.SMALL, "center")
        s.arrow(axes, (LEFT + QUESTION[0] / 2, top + QUESTION[1]), (LEFT + QUESTION[0] / 2, top + STEP))
        other = "yes" if word == "no" else "no"
        s.write(axes, (LEFT + QUESTION[0] / 2 + 8, top + (QUESTION[1] + STEP) / 2), other, s.FAINT, s.SMALL)
    text, colour = LAST
    s.box(axes, (LEFT + 32, TOP + STEP * len(QUESTIONS)), ANSWER, text, colour)
    s.store(figure, "choosing", folder)


if __name__ == "__main__":
    draw()
