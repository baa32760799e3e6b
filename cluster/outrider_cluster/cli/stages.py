"""How far a command of several stages is: bars on a terminal, lines in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["stages_shown"]

_LINES = 10
"""Of a stage, in a log."""


@contextmanager
def stages_shown(console: Console) -> Iterator[Callable[[str, float, str], None]]:
    """Yield a function that hears of a stage, the share of it that is done, and a few words."""
    if console.is_terminal:
        with _bars(console) as listen:
            yield listen
    else:
        yield _lines(console)


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str, float, str], None]]:
    columns = (TextColumn("{task.description:<9}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def listen(stage: str, share: float, words: str) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.stop_task(earlier)
                tasks[stage] = bars.add_task(stage, total=1.0, words="")
            bars.update(tasks[stage], completed=share, words=words)

        yield listen


def _lines(console: Console) -> Callable[[str, float, str], None]:
    """A line when a stage begins, and at every tenth of it."""
    told: dict[str, int] = {}

    def listen(stage: str, share: float, words: str) -> None:
        tenth = int(share * _LINES)
        if tenth > told.get(stage, -1):
            told[stage] = tenth
            console.print(f"{stage}: {share:.0%}{words and f', {words}'}", style="dim", markup=False, soft_wrap=True)

    return listen
