"""The image's recipe: linted, pinned, without root. No image is built here."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"


def test_the_linter_has_nothing_to_say() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_bases_are_pinned_and_the_user_is_not_root() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(bases) == 2, "a build stage, and one without build tools"
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", one) for one in bases)
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


def test_what_is_copied_is_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == allowed
    assert all((ROOT / one).exists() for one in copied)


def test_the_python_of_the_image_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(">=3.11")
