"""The encoder-cache connector for vLLM 0.30 and newer: keeps encoder outputs in host memory and reloads them.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "EcoffloadConnector", "ec_role": "ec_both",
        "ec_connector_extra_config": {"ec_cpu_bytes": "8GiB"}}'

Fetched lazily: options and namespaces can be read, and tested, where vLLM is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["EcoffloadConnector", "Options", "effective_configuration"]

_HOMES = {"EcoffloadConnector": "connector", "Options": "config", "effective_configuration": "config"}

if TYPE_CHECKING:
    from ecoffload.integrations.vllm.config import Options, effective_configuration
    from ecoffload.integrations.vllm.connector import EcoffloadConnector


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == "connector":
        # First, because an older vLLM lacks what the connector imports.
        from vllm import __version__

        from ecoffload.integrations.vllm.config import check_version

        check_version(__version__)
    return getattr(import_module(f"{__name__}.{home}"), name)
