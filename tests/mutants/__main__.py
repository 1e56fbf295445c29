"""``python -m tests.mutants``"""

import sys

from tests.mutants.faults import MUTANTS
from tests.mutants.harness import main

sys.exit(main(MUTANTS))
