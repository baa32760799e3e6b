"""`outrider keys`: make an API key."""

from typing import Annotated

import typer
import yaml

from outrider.core.errors import ConfigError
from outrider.router.api_keys import ApiKey, digest_of, new_key
from outrider_cluster.cli.terminal import errors_as_exit_codes, messages
from outrider_cluster.key_file import MAX_ID_CHARS

__all__ = ["keys"]

keys = typer.Typer(no_args_is_help=True, help="API keys.")


@keys.callback()
def group() -> None:
    """API keys of a deployment."""


@keys.command()
def new(
    owner: Annotated[str, typer.Argument(help="Id of the key's owner: names it in limits, logs and metrics.")],
    max_concurrent_sequences: Annotated[int | None, typer.Option(min=1, help="Choices in flight.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and output tokens.")] = None,
) -> None:
    """Print a new key and its entry for security.api_keys_file. The key itself is stored nowhere.

    The entry goes to standard output, the key to standard error. The file has `keys:` as its first line;
    append the entry to it.
    """
    with errors_as_exit_codes():
        if len(owner) > MAX_ID_CHARS:
            raise ConfigError(f"OWNER: {len(owner)} characters; the file takes ids of {MAX_ID_CHARS} at most")
        key = new_key()
        made = ApiKey(key_id=owner, digest=digest_of(key))
        limits = {
            "max_concurrent_sequences": max_concurrent_sequences,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        entry: dict[str, object] = {"id": made.key_id, "sha256": made.digest.hex()}
        entry |= {name: limit for name, limit in limits.items() if limit is not None}
        messages.print(f"key: {key}", markup=False, highlight=False, soft_wrap=True)
        typer.echo(yaml.safe_dump([entry], sort_keys=False), nl=False)
