"""The same requests with our connector and with vLLM's own: nothing more is encoded, and room is found sooner."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "vllm.distributed.ec_transfer.ec_connector.encoder_output_width", reason="vLLM's own is compared from 0.32 on"
)

import side_by_side


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_no_more_is_encoded_than_with_vllms_own(model: Path, share: float) -> None:
    requests = side_by_side.requests_of(side_by_side.TRACES / "b_shared.csv.gz", 150)
    capacity = int(side_by_side.footprint(requests) * share) // 4096 * 4096
    ours, theirs = (side_by_side.play(model, which, requests, capacity) for which in ("ecoffload", "eccpu"))
    assert ours["encodes"] <= theirs["encodes"]
    assert ours["encodes"] < len(requests)
