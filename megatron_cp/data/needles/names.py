"""Names of needles: plain nouns, which most tokenizers know as one or two tokens."""

from __future__ import annotations

_TEXT = """
acorn anchor ankle apple apron arrow attic badge bagel bamboo banana banjo barn basil basket beach bean bear beaver
bell belt bench berry bike blanket boat bone book boot bottle bowl branch bread brick bridge broom brush bucket
button cabin cable cactus cake camel camera candle canoe carpet carrot castle cedar cellar chain chair chalk cherry
chest chimney circle clay cliff clock cloud clover coat cobra coin comet compass copper coral corn cotton crane
crayon cricket crow crown cup curtain daisy deer desk diamond dolphin donkey door dragon drawer drum duck eagle
earring elbow elm engine falcon feather fence fern ferry fiddle field finger flag flame flute fog forest fork fossil
fountain fox frog garden garlic gate ginger giraffe glacier glass globe glove goat goose grape guitar hammer harbor
harp hat hawk hazel hedge helmet heron hill honey hoof horn horse hotel igloo iris island ivory jacket jaguar jar
jewel jungle kettle key kite kitten knee ladder lake lamp lantern lemon lentil lily lime lion lizard lobster lock
magnet mango maple marble market mask meadow melon mirror mitten mole monkey moose moss moth mountain mouse museum
needle nest nickel oak oasis ocean olive onion orange orchid otter oven owl oyster paddle palace palm panda paper
parrot peach peanut pear pebble pencil pepper piano pillow pine pirate plum pocket pond poppy potato pumpkin puzzle
quartz quilt rabbit raft ribbon rice river road robin rocket roof rope rose ruby saddle sail salmon sandal saucer
scarf school seal shark sheep shell ship shoe shovel silver skate sled sleeve snail snake sofa spider spoon squirrel
stable star statue stone stove straw sugar swan sword table tent thumb ticket tiger toast tomato torch tower train
tulip tunnel turtle umbrella valley vase velvet violin wagon walnut walrus wheel whistle willow window wolf wool
zebra
"""
NOUNS = tuple(_TEXT.split())
