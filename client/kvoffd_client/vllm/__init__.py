"""The vLLM connector. The only part of the client that imports vllm and torch.

Load it with `"kv_connector": "KvoffdConnector"` and
`"kv_connector_module_path": "kvoffd_client.vllm"` in `--kv-transfer-config`.
"""

from kvoffd_client.vllm.connector import KvoffdConnector

__all__ = ["KvoffdConnector"]
