"""The things of which the demo model knows pictures, by their names in
`emoji-datasource-google`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

SIDE = 64
"""Side of a picture in pixels."""
_NAMES = """
accordion airplane alarm_clock ambulance anchor ant apple avocado axe bacon badger bagel balloon
banana banjo baseball basket basketball bat bathtub battery bear beaver bed bee beetle bell bike
boomerang boot broccoli broom bucket bug burrito bus butterfly cactus cake camera candle candy
canoe car carrot castle=european_castle cat chair cheese=cheese_wedge cherries cherry_blossom
chestnut chicken chipmunk church cloud coat coconut cockroach coin compass computer cookie corn
cow crab crayon=lower_left_crayon cricket crocodile croissant crown cucumber cup_of_coffee=coffee
cupcake deer dinosaur=sauropod dodo dog dolphin donkey door doughnut dragon dress
drum=drum_with_drumsticks duck dumpling eagle egg eggplant elephant envelope=email factory feather
ferry fire fire_engine fish flamingo flashlight flower=hibiscus flute football fox=fox_face frog
garlic gear gem ghost gift giraffe=giraffe_face glove=gloves goat goose gorilla grapes guitar
hamburger hammer hamster harp hedgehog helicopter hippopotamus hook horse hot_dog=hotdog hourglass
house ice_cream=icecream jar jellyfish kangaroo key keyboard kite kiwi=kiwifruit koala ladder
ladybug lemon lime lion=lion_face lizard llama lobster lock lollipop magnet mango map=world_map
maple_leaf microphone microscope monkey moon=crescent_moon mosquito mountain mouse mushroom
necktie newspaper octopus olive onion orange=tangerine otter owl oyster package palm_tree
panda=panda_face parachute parrot peach peacock peanut=peanuts pear pencil=pencil2 penguin
phone=iphone piano=musical_keyboard pie pig pill pineapple pizza popcorn potato pretzel printer
purse rabbit raccoon radio rainbow rat razor rhinoceros ring robot=robot_face rocket rose sandal
sandwich satellite saxophone scarf school scissors scooter scorpion scroll seal shark sheep shell
shield ship shoe=mans_shoe shorts shovel shrimp skateboard skull skunk sled sloth snail snake
snowflake snowman soap sock=socks spider spoon squid star stethoscope strawberry sun=sunny
sunflower swan sword=dagger_knife syringe taco taxi teapot teddy_bear telescope television=tv
tennis_ball=tennis tent tiger toilet tomato toolbox tooth toothbrush tractor train truck trumpet
tulip turkey turtle umbrella unicorn=unicorn_face violin volcano waffle watch watermelon whale
wheel wolf worm wrench yarn zebra=zebra_face
"""
_PLURALS = {
    "cherries": "cherries", "deer": "deer", "fish": "fish", "goose": "geese", "grapes": "grapes",
    "mouse": "mice", "scissors": "scissors", "sheep": "sheep", "shorts": "shorts",
    "shrimp": "shrimp", "squid": "squid", "tooth": "teeth", "wolf": "wolves",
    "cup of coffee": "cups of coffee", "bacon": "bacon", "yarn": "yarn",
    "popcorn": "popcorn", "corn": "corn", "soap": "soap", "garlic": "garlic",
    "broccoli": "broccoli", "fire": "fires", "maple leaf": "maple leaves", "jellyfish": "jellyfish",
    "snowman": "snowmen", "scarf": "scarves", "cheese": "cheese",
}  # fmt: skip
_WITHOUT_ARTICLE = (
    *("cherries", "grapes", "scissors", "shorts", "bacon", "popcorn", "corn", "soap", "garlic"),
    *("broccoli", "yarn", "cheese"),
)


class Thing(NamedTuple):
    name: str
    """One of them, such as `hot dog`."""
    plural: str
    picture: str
    """Its `short_name` in the package."""

    @property
    def with_article(self) -> str:
        if self.name in _WITHOUT_ARTICLE:
            return self.name
        is_vowel = self.name[0] in "aeio" or self.name in ("umbrella", "hourglass")
        return f"{'an' if is_vowel else 'a'} {self.name}"


def _plural(name: str) -> str:
    if name in _PLURALS:
        return _PLURALS[name]
    if name.endswith(("s", "x", "ch", "sh", "potato", "tomato", "mosquito", "mango", "volcano")):
        return f"{name}es"
    if name.endswith("y") and name[-2] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}s"


def all_things() -> list[Thing]:
    """All things in alphabetical order."""
    found = []
    for word in _NAMES.split():
        name, _, picture = word.partition("=")
        text = name.replace("_", " ")
        found.append(Thing(text, _plural(text), picture or name))
    return sorted(found)


def load_pictures(package: Path, things: list[Thing]) -> torch.Tensor:
    """[things, 4, SIDE, SIDE] float32 from 0 to 1, colours multiplied by their opacity, from the
    unpacked npm package. Raises ValueError if it lacks one.
    """
    entries = json.loads((package / "emoji.json").read_bytes())
    files: Mapping[str, str] = {one["short_name"]: one["image"] for one in entries}
    if missing := [thing.picture for thing in things if thing.picture not in files]:
        raise ValueError(f"{package} has no pictures of {', '.join(missing)}")
    pictures = []
    for thing in things:
        with Image.open(package / "img/google/64" / files[thing.picture]) as image:
            numbers = np.array(image.convert("RGBA").resize((SIDE, SIDE)), np.float32)
            pixels = torch.from_numpy(numbers).permute(2, 0, 1) / 255
        pictures.append(torch.cat((pixels[:3] * pixels[3:], pixels[3:])))
    return torch.stack(pictures)
