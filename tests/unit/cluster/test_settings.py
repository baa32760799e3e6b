"""Settings: the shipped files load, and what cannot work is refused with file, line and field."""

from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.core.speculation import SpeculationPreference
from outrider_cluster.sections import EngineKind
from outrider_cluster.settings import Environment, Settings, default_settings, load_settings, parse_settings

SERVE = Path(__file__).parents[3] / "infra" / "serve"

MINIMAL = """\
model:
  name: m
  max_model_len: 128
target:
  kv: {num_blocks: 64}
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, origin="f.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(SERVE.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path) -> None:
    settings = load_settings(path)
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


def test_the_reference_configuration_is_the_4_plus_1_group() -> None:
    settings = load_settings(SERVE / "h100-4plus1.yaml")
    assert settings.target.tensor_parallel_size == 4
    assert settings.target.gpus_per_rank == 1
    assert settings.active_draft is not None
    assert settings.active_draft.num_gpus == 1


def test_the_embedded_default_is_the_laptop_file() -> None:
    assert default_settings() == load_settings(SERVE / "laptop.yaml")


def test_the_scripted_file_is_scripted() -> None:
    assert load_settings(SERVE / "scripted.yaml").engine is EngineKind.SCRIPTED


def test_a_minimal_file_has_no_draft() -> None:
    settings = parse_settings(MINIMAL, origin="f.yaml")
    assert settings.active_draft is None
    assert settings.model.public_name == "m"
    assert settings.speculation.gate().preference is SpeculationPreference.AUTO


@pytest.mark.parametrize("word", ["off", '"off"', "no"])
def test_off_without_quotes_means_off(word: str) -> None:
    text = MINIMAL + f"speculation: {{preference: {word}}}\n"
    assert parse_settings(text, origin="f.yaml").speculation.gate().preference is SpeculationPreference.OFF


def test_a_traffic_class_may_differ_from_everyone() -> None:
    text = MINIMAL + "speculation:\n  classes:\n    batch: {preference: off}\n    chat: {max_num_draft_tokens: 2}\n"
    batch, chat = parse_settings(text, origin="f.yaml").speculation.gate().classes
    assert (batch.traffic_class, batch.preference) == ("batch", SpeculationPreference.OFF)
    assert (chat.preference, chat.max_num_draft_tokens) == (None, 2)


def test_a_disabled_draft_is_no_draft() -> None:
    text = MINIMAL + "draft: {enabled: false, kv: {num_blocks: 1}}\n"
    assert parse_settings(text, origin="f.yaml").active_draft is None


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("targets: {}\n", "f.yaml:6: targets: unknown key; did you mean target?"),
        ("speculation:\n  max_num_draft_tokens: -1\n", "f.yaml:7: speculation.max_num_draft_tokens:"),
        ("speculation:\n  ngram:\n    promt: 1\n", "f.yaml:8: speculation.ngram.promt: unknown key"),
        ("router: {default_timeout_s: 0}\n", "f.yaml:6: router.default_timeout_s:"),
        ("router: {default_timeout_s: -1}\n", "f.yaml:6: router.default_timeout_s:"),
        ("draft:\n  kv: {num_blocks: 1, cache_gib: 1}\n", "draft.kv: set only one of num_blocks and cache_gib"),
        ("router: {num_replicas: 2, autoscaling: {}}\n", "router: set num_replicas or autoscaling, not both"),
        ("telemetry: {exporter: otlp}\n", "telemetry: endpoint belongs to exporter otlp"),
        ("model: {}\n", "f.yaml:6: model: given twice"),
        ("grpc: {port: 70000}\n", "f.yaml:6: grpc.port:"),
        ("speculation: {max_temperature: .inf}\n", "f.yaml:6: speculation.max_temperature:"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(extra: str, expected: str) -> None:
    assert expected in refusal(MINIMAL + extra)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [*a]\n", "f.yaml: nested too deeply, or an anchor that contains itself"),
        ("a: \0\n", "f.yaml: unacceptable character"),
        ("a: 2026-13-45\n", "f.yaml: month must be in 1..12"),
        ("a: 1\n? [b]\n: 2\n", "f.yaml:2: a key has to be a word"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="byte 3 is not UTF-8"):
        load_settings(path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("num_blocks: 64", "num_blocks: 7", "fewer than model.max_model_len 128"),
        ("kv: {num_blocks: 64}", "kv: {num_blocks: 64}\n  max_num_batched_tokens: 8", "below target.max_num_seqs 64"),
        (
            "kv: {num_blocks: 64}",
            "kv: {num_blocks: 64}\n  max_num_seqs: 1\n  max_num_batched_tokens: 5",
            "cannot hold one sequence's verify step",
        ),
        ("kv: {num_blocks: 64}", "kv: {num_blocks: 64}\n  timeouts: {heartbeat_s: 1}", "must exceed"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(old: str, new: str, expected: str) -> None:
    assert expected in refusal(MINIMAL.replace(old, new))


def test_one_sequence_with_four_draft_tokens_is_allowed() -> None:
    text = MINIMAL.replace("kv:", "max_num_seqs: 1\n  max_num_batched_tokens: 6\n  kv:")
    assert parse_settings(text, origin="f.yaml").target.max_num_seqs == 1


def test_drafts_follow_only_targets_that_follow_the_load() -> None:
    text = MINIMAL + "draft: {kv: {num_blocks: 64}, autoscaling: {max_replicas: 2}}\n"
    assert "draft.autoscaling: drafts follow the targets, whose number is fixed" in refusal(text)
    scaled = text.replace("target:\n", "target:\n  autoscaling: {max_replicas: 2}\n")
    assert parse_settings(scaled, origin="f.yaml").active_draft is not None


def test_a_gpu_target_needs_a_gpu_draft() -> None:
    text = MINIMAL.replace("kv:", "gpus_per_rank: 1\n  kv:") + "draft: {kv: {num_blocks: 64}}\n"
    assert "draft.num_gpus is 0" in refusal(text)


@pytest.mark.parametrize(("text", "expected"), [("a: [", "f.yaml:"), ("- 1", "f.yaml:1: "), ("", "f.yaml:1: ")])
def test_a_file_that_is_no_mapping_is_refused(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml")


def test_the_environment_is_read_at_the_edge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_AUTH_TOKEN", "secret")
    environment = Environment.read()
    assert environment.cache_dir == tmp_path
    assert "secret" not in repr(environment)


def test_node_labels_need_a_cluster_to_join() -> None:
    text = MINIMAL + "  node_labels: {outrider-role: target}\n"
    assert "target.node_labels: the one node" in refusal(text)
    assert parse_settings(text + "ray: {address: auto}\n", origin="f.yaml").target.node_labels == {
        "outrider-role": "target"
    }
    assert "target.node_labels" in refusal(MINIMAL + "  node_labels: {outrider-role: 'in(a,b)'}\n")


def test_http_tls_and_keys_are_off_or_on_by_name() -> None:
    plain = parse_settings(MINIMAL, origin="f.yaml")
    assert (plain.http.enabled, plain.data_plane.tls, plain.security.api_keys_file) == (True, None, None)
    guarded = parse_settings(
        MINIMAL
        + "http: {enabled: false, max_body_mib: 0.5}\nsecurity: {api_keys_file: /keys.yaml}\n"
        + "data_plane: {tls: {cert_file: /c, key_file: /k, ca_file: /a}}\n",
        origin="f.yaml",
    )
    assert not guarded.http.enabled
    assert guarded.data_plane.tls is not None
    assert guarded.data_plane.tls.server_name == "outrider.internal"


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("security: {api_keys_file: keys.yaml}", "security.api_keys_file"),
        ("data_plane: {tls: {cert_file: c, key_file: /k, ca_file: /a}}", "data_plane.tls.cert_file"),
        ("data_plane: {tls: {cert_file: /c, key_file: /k}}", "data_plane.tls.ca_file"),
        ("http: {max_body_mib: 0}", "http.max_body_mib"),
    ],
)
def test_security_that_cannot_hold_is_refused(section: str, named: str) -> None:
    assert named in refusal(MINIMAL + section + "\n")
