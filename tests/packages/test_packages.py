"""The table of trainings of packages. `make test-packages` runs them, in an environment of their own."""

import re
from pathlib import Path

from tests.exports.environments import REQUIREMENTS
from tests.packages.run import ENDS

FOLDER = Path(__file__).parent


def test_there_are_sixty_trainings_of_twenty_packages_that_the_environment_has() -> None:
    packages = re.findall(r'^@of\("(.+)"\)$', (FOLDER / "trainings.py").read_text(), re.MULTILINE)
    assert len(packages) >= 60 and len(set(packages)) >= 20
    installed = re.findall(r"^(.+)==", (REQUIREMENTS / "packages.txt").read_text(), re.MULTILINE)
    assert set(packages) - {"torch"} <= set(installed)
    assert ENDS[0] == "plan" and ENDS[-1] == "failed"
