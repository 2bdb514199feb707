"""The colours of figures, for modules that have not moved to `lab.figures` yet."""

from .lab.figures import BLACK as BLACK
from .lab.figures import BLUE as BLUE
from .lab.figures import GREEN as GREEN
from .lab.figures import ORANGE as ORANGE
from .lab.figures import PURPLE as PURPLE
from .lab.figures import SKY as SKY
from .lab.figures import VERMILION as VERMILION
