"""Declarations for `serve deploy` and KubeRay: complete, readable again, and careful about live changes."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.core.errors import ConfigError
from outrider_cluster.app import build
from outrider_cluster.declaration import as_rayservice_patch, as_yaml, declaration, deployed_settings
from outrider_cluster.settings import Settings, parse_settings

TEXT = """\
model: {name: m, max_model_len: 128}
target: {kv: {num_blocks: 64}}
speculation: {batch_size_threshold: 4}
grpc: {port: 9000}
http: {port: 8000}
"""


def settings(text: str = TEXT) -> Settings:
    return parse_settings(text, origin="f.yaml")


def test_a_declaration_is_what_serve_takes_and_reads_back(tmp_path: Path) -> None:
    declared = declaration(settings())
    ServeDeploySchema.model_validate(declared)
    for name, text in (("a", as_yaml(declared)), ("b", as_rayservice_patch(declared, name="outrider"))):
        path = tmp_path / name
        path.write_text(text)
        assert deployed_settings(path) == settings()


def test_a_live_change_keeps_the_arguments() -> None:
    later = settings(TEXT.replace("threshold: 4", "threshold: 2"))
    (application,) = declaration(later, deployed=settings())["applications"]
    assert Settings.model_validate(application["args"]["settings"]) == settings()
    configs = [Settings.model_validate(one["user_config"]) for one in application["deployments"]]
    assert configs == [later, later]  # router and target; there is no draft


def test_a_change_that_takes_new_replicas_is_not_called_live() -> None:
    later = settings(TEXT.replace("num_blocks: 64", "num_blocks: 65"))
    with pytest.raises(ConfigError, match=r"^target\.kv: a change here takes new replicas"):
        declaration(later, deployed=settings())
    assert declaration(later)["applications"][0]["args"]["settings"]["target"]["kv"]["num_blocks"] == 65


@pytest.mark.parametrize("section", ["grpc", "http"])
def test_ports_are_fixed(section: str) -> None:
    value = yaml.safe_load(TEXT)
    value[section]["port"] = 0
    with pytest.raises(ConfigError, match=f"^{section}.port"):
        declaration(Settings.model_validate(value))


@pytest.mark.parametrize("text", ["", "a: 1", "applications: []", "applications: [{name: other}]", "{"])
def test_a_file_that_declares_nothing_of_ours_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml: not a declaration of application outrider"):
        deployed_settings(path)


WRONG = {"model": {"name": "m", "max_model_len": -1}, "target": {"max_num_sequences": 4}}
PROBLEMS = (
    "args.settings: model.max_model_len: Input should be greater than 0",
    "args.settings: target.max_num_sequences: unknown key; did you mean max_num_seqs?",
)


def test_serve_is_told_the_field_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        build({"settings": WRONG})
    assert str(refused.value).splitlines() == list(PROBLEMS)
    with pytest.raises(ConfigError, match=r"args\.settings: Input should be"):
        build({"settings": ["m"]})
    for args in ({}, {"config": 3}, {"config": "a.yaml", "settings": {}}):
        with pytest.raises(ConfigError, match="args: give settings"):
            build(args)
    path = tmp_path / "declared.yaml"
    path.write_text(yaml.dump({"applications": [{"name": "outrider", "args": {"settings": WRONG}}]}))
    with pytest.raises(ConfigError) as refused:
        deployed_settings(path)
    assert str(refused.value).splitlines() == [f"{path}: {one}" for one in PROBLEMS]
