import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as for a script that is run


@pytest.fixture(scope="module")
def script(request):
    """The script that the test file is named after."""
    return importlib.import_module(request.path.stem.removeprefix("test_"))
