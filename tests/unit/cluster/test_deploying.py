"""The declared state as Serve gets it; neither Ray nor Serve runs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from outrider_cluster.deploying import Deployer
from outrider_cluster.live import Change
from outrider_cluster.settings import Settings, default_settings


def other(section: str, **fields: object) -> Settings:
    values = default_settings().model_dump(mode="json")
    values[section] |= fields
    return Settings.model_validate(values)


def answer_with(monkeypatch: pytest.MonkeyPatch, deploy_apps: Callable[[ServeDeploySchema], None]) -> None:
    monkeypatch.setattr(
        "outrider_cluster.deploying._get_global_client", lambda: SimpleNamespace(deploy_apps=deploy_apps)
    )


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        (other("speculation", preference="off"), Change.LIVE),
        (other("target", max_num_seqs=4), Change.ROLLING),
    ],
)
def test_what_serve_did_not_take_is_not_applied(
    monkeypatch: pytest.MonkeyPatch, changed: Settings, change: Change
) -> None:
    declared: list[Any] = []

    def deaf(schema: ServeDeploySchema) -> None:
        raise ConnectionError("no controller")

    deployer = Deployer(default_settings())
    answer_with(monkeypatch, deaf)
    with pytest.raises(ConnectionError):
        deployer.update(changed)
    answer_with(monkeypatch, lambda schema: declared.append(schema.applications[0].args["settings"]))
    assert deployer.update(default_settings()) is Change.NONE
    assert deployer.update(changed) is change
    before, after = (Settings.model_validate(one) for one in declared)
    assert before == default_settings()
    assert after == (changed if change is Change.ROLLING else default_settings())
