"""The example's broker in a folder, found by its file: its package would set up the site."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def _load() -> Any:
    path = ROOT / "example_project" / "example_project" / "broker.py"
    spec = spec_from_file_location("tests.faults.stages.example_broker", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Transport: Any = _load().Transport
