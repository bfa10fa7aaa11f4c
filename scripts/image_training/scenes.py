"""Random scenes of small pictures on a ground, and what is in them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

SIZE = 256
"""Side of a scene in pixels."""
MOST = 4
"""Most things in a scene."""
GRID = 3
"""Rows and columns of places for things, at most one thing in each."""
_CELL = SIZE / GRID
GROUNDS = {
    "white": (250, 250, 250), "black": (12, 12, 12), "grey": (128, 128, 128),
    "red": (205, 40, 40), "green": (45, 150, 60), "blue": (50, 90, 205),
    "yellow": (245, 215, 60), "orange": (240, 140, 40), "purple": (130, 60, 170),
    "pink": (245, 150, 190), "brown": (120, 75, 40),
}  # fmt: skip


@dataclass(slots=True)
class Scene:
    """What is drawn. Places are in pixels, things numbers of the list of things."""

    things: list[int] = field(default_factory=list)
    """In the order of reading: by rows of places, then from left to right."""
    centres: list[tuple[float, float]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    angles: list[float] = field(default_factory=list)
    ground: str | None = None
    """Its name; None: two colours that run into each other."""
    colours: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (0.0,))

    @property
    def kinds(self) -> list[int]:
        """The things without repetitions, in the same order."""
        return list(dict.fromkeys(self.things))


def random_scene(dice: random.Random, num_things: int, kind: str | None = None) -> Scene:
    """A scene of `single` (one thing), `same` (one to four alike), or `mixed` things; None: any."""
    kind = kind or dice.choices(("single", "same", "mixed"), (0.25, 0.4, 0.35))[0]
    first = dice.randrange(num_things)
    things = [first]
    if kind == "same":
        things = [first] * dice.randint(1, MOST)
    elif kind == "mixed":
        things = [dice.randrange(num_things) for _ in range(dice.randint(2, MOST))]
        if dice.random() < 0.3:
            things[-1] = things[0]
            dice.shuffle(things)
    scene = Scene(things=things)
    if len(things) == 1:
        size = dice.uniform(56, 190)
        room = SIZE - 0.8 * size
        scene.sizes.append(size)
        scene.centres.append(tuple(0.4 * size + dice.random() * room for _ in "xy"))  # type: ignore[arg-type]
    else:
        for place in sorted(dice.sample(range(GRID * GRID), len(things))):
            row, column = divmod(place, GRID)
            x, y = (_CELL * (at + 0.5) + dice.uniform(-9, 9) for at in (column, row))
            scene.centres.append((x, y))
            scene.sizes.append(dice.uniform(52, 86))
    scene.angles = [dice.uniform(-0.35, 0.35) for _ in things]
    _choose_ground(dice, scene)
    return scene


def _choose_ground(dice: random.Random, scene: Scene) -> None:
    if dice.random() < 0.6:
        scene.ground = dice.choice(list(GROUNDS))
        colour = tuple(
            min(255.0, max(0.0, one + dice.uniform(-12, 12))) for one in GROUNDS[scene.ground]
        )
        scene.colours = colour, colour
    else:
        scene.colours = tuple(tuple(dice.uniform(0, 255) for _ in range(3)) for _ in range(2))  # type: ignore[assignment]


def draw(scenes: Sequence[Scene], pictures: torch.Tensor) -> torch.Tensor:
    """[N, SIZE, SIZE, 3] uint8 on the device of `pictures`, which are those of `load_pictures`."""
    device, count = pictures.device, len(scenes)
    ends = torch.tensor([scene.colours for scene in scenes], device=device) / 255
    along = torch.linspace(0, 1, SIZE, device=device).view(1, 1, SIZE, 1)
    canvas = ends[:, 0, :, None, None] + (ends[:, 1] - ends[:, 0])[:, :, None, None] * along
    canvas = canvas.expand(count, 3, SIZE, SIZE)
    for number in range(max(len(scene.things) for scene in scenes)):
        numbers, affine = [], []
        for scene in scenes:
            has_it = number < len(scene.things)
            numbers.append(scene.things[number] if has_it else 0)
            affine.append(_matrix(scene, number) if has_it else _OUTSIDE)
        grid = F.affine_grid(
            torch.tensor(affine, device=device), [count, 4, SIZE, SIZE], align_corners=False
        )
        drawn = F.grid_sample(
            pictures[torch.tensor(numbers, device=device)], grid, align_corners=False
        )
        canvas = canvas * (1 - drawn[:, 3:]) + drawn[:, :3]
    noise = torch.randn(canvas.shape, device=device) * 0.012
    return ((canvas + noise).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


_OUTSIDE = ((1.0, 0.0, 9.0), (0.0, 1.0, 9.0))


def _matrix(scene: Scene, number: int) -> tuple[tuple[float, ...], ...]:
    """From places of the scene, -1 to 1, to those of a picture."""
    (x, y), size, angle = scene.centres[number], scene.sizes[number], scene.angles[number]
    factor, left, top = SIZE / size, 2 * x / SIZE - 1, 2 * y / SIZE - 1
    cos, sin = factor * math.cos(angle), factor * math.sin(angle)
    return ((cos, sin, -cos * left - sin * top), (-sin, cos, sin * left - cos * top))


def labels(scenes: Sequence[Scene], side: int) -> torch.Tensor:
    """[N, side * side] int64: 1 + the thing around the centre of each square of a scene, or 0."""
    found = torch.zeros(len(scenes), side, side, dtype=torch.int64)
    step = SIZE / side
    for row, scene in zip(found, scenes, strict=True):
        for thing, (x, y), size in zip(scene.things, scene.centres, scene.sizes, strict=True):
            reach = max(0.4 * size, 0.5 * step)
            low = [max(0, math.ceil((at - reach) / step - 0.5)) for at in (y, x)]
            high = [min(side - 1, math.floor((at + reach) / step - 0.5)) for at in (y, x)]
            row[low[0] : high[0] + 1, low[1] : high[1] + 1] = 1 + thing
    return found.flatten(1)
