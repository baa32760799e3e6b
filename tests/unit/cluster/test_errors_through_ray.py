"""Every error of ours reaches another process of Ray's with its class, its words and its fields."""

import ast
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError
from tests.unit.rpc.test_errors import CASES

import outrider
import outrider_cluster
from outrider.core.errors import EngineUnavailable, OutriderError
from outrider.router.openai.failures import BodyTooLarge

_cloudpickle: Callable[[object], bytes] = cloudpickle.dumps
ERRORS = [error for error, _ in CASES] + [OutriderError("anything"), BodyTooLarge(5)]


def test_no_kind_is_forgotten_here() -> None:
    sources = [path for package in (outrider, outrider_cluster) for path in Path(package.__path__[0]).rglob("*.py")]
    found = [
        node for path in sources for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)
    ]
    ours = {"OutriderError"}
    while more := {one.name for one in found if ours & {ast.unparse(base) for base in one.bases}} - ours:
        ours |= more
    assert ours == {type(one).__name__ for one in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "through",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: cloudpickle.loads(_cloudpickle(error)),
        copy.copy,
    ],
    ids=["pickle", "cloudpickle", "copy"],
)
def test_an_error_comes_back_as_it_was(through: Callable[[OutriderError], OutriderError], error: OutriderError) -> None:
    back = through(error)
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_call_of_an_actor_raises_the_error_itself(error: OutriderError) -> None:
    kind: Any = RayTaskError
    raised = kind.from_bytes(kind("f", "traceback", error).to_bytes()).as_instanceof_cause()
    assert type(error) in type(raised).__mro__
    assert str(raised.cause) == str(error)
    assert vars(raised.cause) == vars(error)


def test_notes_travel_along() -> None:
    error = EngineUnavailable("rank 1 died")
    error.add_note("twice")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["twice"]
