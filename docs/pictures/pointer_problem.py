"""One address above 2**63: what a signed and an unsigned reader see, and that its 64 bits are the same."""

from __future__ import annotations

from style import BLUE, GREEN, GREY, ORANGE, RED, canvas, save

ADDRESS = 0xFFFF_D556_B640_0000
figure, axes = canvas(8.4, 3.5)
LEFT, RIGHT = 0.9, 8.0
MIDDLE = (LEFT + RIGHT) / 2


def place(address: int) -> float:
    return LEFT + (RIGHT - LEFT) * address / 2**64


axes.text(LEFT, 3.2, "device addresses are unsigned: 0 .. 2**64", color=GREY)
axes.barh(2.7, MIDDLE - LEFT, 0.3, left=LEFT, color=BLUE)
axes.barh(2.7, RIGHT - MIDDLE, 0.3, left=MIDDLE, color=ORANGE)
axes.text((LEFT + MIDDLE) / 2, 2.7, "int64 reads the same number", color="white", ha="center", va="center", fontsize=8)
axes.text((MIDDLE + RIGHT) / 2, 2.7, "int64 reads a negative one", color="white", ha="center", va="center", fontsize=8)
for x, text in ((LEFT, "0"), (MIDDLE, "2**63"), (RIGHT, "2**64")):
    axes.text(x, 2.38, text, ha="center", color=GREY, fontsize=8)
for address, text, align in ((0x7FD6_E000_0000, "NVIDIA, AMD", "left"), (ADDRESS, "Intel", "right")):
    axes.plot(place(address), 2.93, "v", color=RED)
    axes.text(place(address) + (0.1 if align == "left" else -0.1), 2.95, text, ha=align, color=RED, fontsize=8)

axes.text(LEFT, 1.85, "one address, one pattern of bits", color=GREY)
axes.barh(1.45, RIGHT - LEFT, 0.32, left=LEFT, color=GREEN)
words = f"{ADDRESS:064b}"
axes.text(MIDDLE, 1.45, words, color="white", ha="center", va="center", fontsize=7.6, family="monospace")
for x, dtype, value in (
    (LEFT + 1.8, "under uint64", ADDRESS),
    (RIGHT - 1.8, "under int64", ADDRESS - 2**64),
):
    axes.annotate("", (x, 0.78), (x, 1.28), arrowprops={"arrowstyle": "-|>", "color": GREY})
    axes.text(x, 0.55, f"{dtype}: {value}", ha="center", fontsize=9)
axes.text(MIDDLE, 0.15, "an encoding moves no bits: it only says under which name a kernel reads them", ha="center")
save(figure, __file__)
