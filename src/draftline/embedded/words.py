"""The vocabulary of the embedded targets' language. A change here asks for new targets and new data."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Carla David Emma Felix Greta Hugo Irma Jonas Karin Leo Maria Nils Olga Paul Rosa Simon "
    "Tilda Victor"
)
ANIMALS = _words("badger cat crow dog duck fox goat hare horse lynx mole otter owl pony robin sheep")
THINGS = _words(
    "anchor basket bell boat book candle clock cup drum flute hat kite lamp ladder mirror rope spoon violin"
)
PLACES = _words(
    "bridge castle field forest garden harbor hill house island market meadow mill river school tower"
)
COLORS = _words("black blue brown gray green orange pink purple red silver white yellow")
MOODS = _words("angry brave calm clever gentle happy kind lonely proud quiet shy tired")
SIZES = _words("big heavy huge little long narrow old round small strange tall tiny")
ACTIONS = _words("carries chases drops finds follows hides holds likes paints sees takes watches")
RELATIONS = _words("above behind beside beyond inside near opposite outside under")
WEATHER = _words("cloudy cold foggy rainy snowy sunny warm windy")
CITIES = _words("Athens Berlin Cairo Dublin Geneva Lima London Madrid Oslo Paris Rome Tokyo Vienna Warsaw")
PARAMETERS = _words(
    "a b c count first i item j k left m n other p q right second size total value width x y z"
)
