"""YAML with line numbers: what a file says, and where it says it."""

from collections.abc import Sequence
from typing import Any

import yaml

from outrider.core.errors import ConfigError

__all__ = ["YamlSource", "field_problem"]


def field_problem(location: Sequence[int | str], problem: str) -> str:
    """The dotted field, if it is about one, and what is wrong with it."""
    text = problem.removeprefix("Value error, ")
    return ": ".join([*([".".join(str(part) for part in location)] if location else []), text])


class YamlSource:
    """A parsed YAML document that can tell on which line a field stands."""

    def __init__(self, text: str, origin: str, *, shape: str = "a mapping of sections") -> None:
        """Parse. Raises `ConfigError` for bad syntax, a repeated key, or no mapping at the top, `shape` in words."""
        self._origin = origin
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self._refuse_repeated_keys(self._root)
            self.value: Any = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{origin}:{line}: {error.problem}") from error
        except yaml.YAMLError as error:  # a character that YAML does not allow
            raise ConfigError(f"{origin}: {str(error).splitlines()[0]}") from error
        except RecursionError as error:
            raise ConfigError(f"{origin}: nested too deeply, or an anchor that contains itself") from error
        except ValueError as error:  # what looks like a date, and is none
            raise ConfigError(f"{origin}: {error}") from error
        if not isinstance(self.value, dict):
            raise ConfigError(f"{origin}:1: the file has to be {shape}")

    def describe(self, location: Sequence[int | str], problem: str) -> str:
        """One line: file, line, dotted field, problem. The line is that of the nearest key in the file."""
        line = f":{self._line(location)}" if location else ""
        return f"{self._origin}{line}: {field_problem(location, problem)}"

    def _line(self, location: Sequence[int | str]) -> int:
        node, line = self._root, 1
        for part in location:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(part)]
                if not found:
                    break
                key, node = found[0]
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                break
        return line

    def _refuse_repeated_keys(self, node: yaml.Node | None) -> None:
        # PyYAML keeps the last of two equal keys without a word.
        if isinstance(node, yaml.SequenceNode):
            for child in node.value:
                self._refuse_repeated_keys(child)
        if not isinstance(node, yaml.MappingNode):
            return
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._origin}:{key.start_mark.line + 1}: a key has to be a word")
            if key.value in seen:
                raise ConfigError(f"{self._origin}:{key.start_mark.line + 1}: {key.value}: given twice")
            seen.add(key.value)
            self._refuse_repeated_keys(value)
