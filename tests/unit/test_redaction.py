"""Paths go, everything else stays."""

import pytest

from outrider.core.redaction import without_paths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 0: [Errno 2] No such file: '/models/llama/config.json'", "rank 0: [Errno 2] No such file: '(path)'"),
        ("cannot load /a/b: denied", "cannot load (path): denied"),
        ('File "/usr/lib/x.py", line 3', 'File "(path)", line 3'),
        ("cannot open:/a/b, unix:/run/x.sock or file:///etc/y", "cannot open:(path), unix:(path) or (path)"),
        ("see ~/secrets/key or ../up", "see (path) or (path)"),
        ("model 'meta-llama/Llama-3.1' is not served", "model 'meta-llama/Llama-3.1' is not served"),
        ("no answer from 10.0.0.3:4567 within 5 s", "no answer from 10.0.0.3:4567 within 5 s"),
        ("3 tokens/s, and/or 1/2", "3 tokens/s, and/or 1/2"),
        ("the stream of https://host/path broke", "the stream of https://host/path broke"),
    ],
)
def test_paths_are_replaced(text: str, shown: str) -> None:
    assert without_paths(text) == shown
