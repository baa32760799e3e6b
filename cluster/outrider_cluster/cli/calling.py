"""How the commands call a deployment."""

from outrider.rpc.client import ClientOptions
from outrider_cluster.settings import Environment

__all__ = ["client_options"]


def client_options() -> ClientOptions:
    """With the API key of the environment, where there is one."""
    return ClientOptions(api_key=Environment.read().api_key)
