"""Tells vLLM the connector's name. vLLM calls `register` once in every process (entry point `vllm.general_plugins`).

An exception here would end a process that may never use the cache, so it raises nothing; and it imports neither torch
nor the connector, because vLLM also runs it in its front end.
"""

from __future__ import annotations

import logging

__all__ = ["NAME", "register"]

NAME = "EcoffloadConnector"


def register() -> None:
    """Make `"ec_connector": "EcoffloadConnector"` work without a module path. Safe to call more than once."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

        if NAME not in ECConnectorFactory._registry:
            ECConnectorFactory.register_connector(NAME, "ecoffload.integrations.vllm", NAME)
    except Exception as error:
        # The remedy works on every vLLM that has connectors at all.
        logging.getLogger("vllm.ecoffload").warning(
            "the connector %s could not be registered (%r); name it by "
            '"ec_connector_module_path": "ecoffload.integrations.vllm"',
            NAME,
            error,
        )
