"""A real model's logits in bf16 against float64, prompts of 128k tokens, and weights that reach the device whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine.core import EngineCore
from engine.devices import config_for_device
from engine.gpu_runner import GpuRunner
from engine.upload import Uploader
from pdserve.model_store import ModelUnavailableError, prepare_default_model
from tests.e2e.conftest import OWN_PROMPTS
from tests.e2e.oracle import Oracle
from tests.gpu.test_gpu_engine import outputs_of, prompt, request, tokens_of, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGEST_ERROR, MEAN_ERROR = 0.3, 0.08
"""Of bf16 log probabilities among a token's 20 likeliest, against float64."""
LONG_TOKENS = 131_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_uploaded_tensors_are_whole(dtype: torch.dtype) -> None:
    """Smaller and larger than a buffer, and many of them, so that buffers are used again while copies run."""
    uploader = Uploader(torch.device("cuda"), buffer_bytes=1 << 20)
    sizes = [(1,), (3, 5), (1 << 19, 1), (1000, 1001), (7, 300_001)]
    tensors = [(torch.randn(size) * 50).to(dtype) for size in sizes * 4]
    uploaded = [uploader.upload(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, uploaded, strict=True):
        assert torch.equal(copy.cpu(), tensor)


def test_bfloat16_log_probabilities_of_a_real_model_are_near_those_in_float64() -> None:
    try:
        directory = prepare_default_model()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    oracle = Oracle(directory)
    truth = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    prompts = [oracle.chat_ids(text) for text in OWN_PROMPTS]
    options = {"model": str(directory), "device": "cuda", "dtype": "bfloat16", "gpu_memory_utilization": 0.2}
    config = config_for_device({**options, "max_num_seqs": 16})
    messages = [request(i, tokens, 1, logprobs=20) for i, tokens in enumerate(prompts)]
    got = outputs_of(EngineCore(config, GpuRunner(config)), messages)
    errors = []
    for i, tokens in enumerate(prompts):
        with torch.inference_mode():
            wanted = truth(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        (found,) = got[f"r{i}"][0].logprobs
        for token, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True):
            errors.append(abs(logprob - float(wanted[token])))
    print(f"bf16 against float64: largest {max(errors):.4f}, mean {np.mean(errors):.4f} of {len(errors)}")
    assert len(errors) == 20 * len(prompts)
    assert max(errors) < LARGEST_ERROR
    assert np.mean(errors) < MEAN_ERROR


@pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")  # its name before transformers 5.24
def test_a_prompt_of_131k_tokens_goes_in_chunks_beside_others(tmp_path: Path) -> None:
    directory = write_model(tmp_path, torch.float32, max_positions=LONG_TOKENS + 100, layers=2, heads=2, kv_heads=1)
    options = {"model": directory, "device": "cuda", "num_blocks": 2200, "max_num_seqs": 8, "layer_group_size": 2}
    config = config_for_device(options)
    long = request(0, prompt(0, LONG_TOKENS), 6)
    beside = [request(i, prompt(i, 30 * i), 40) for i in (1, 2, 3)]
    got = tokens_of(outputs_of(EngineCore(config, GpuRunner(config)), [*beside, long], every=1))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().cuda()
    for message in (long, *beside):
        wanted = greedy(model, message.prompt_token_ids, message.sampling.max_tokens)
        assert got[message.request_id] == wanted, message.request_id


@torch.inference_mode()
def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Transformers' output, the prompt in parts: its attention in float32 holds every score of a part at once."""
    part, cache, drawn = 2048, DynamicCache(), list[int]()
    pending = torch.tensor([tokens], device="cuda")
    while len(drawn) < count:
        for start in range(0, pending.shape[1], part):
            logits = model(pending[:, start : start + part], past_key_values=cache, logits_to_keep=1).logits
        drawn.append(int(logits[0, -1].argmax()))
        pending = torch.tensor([drawn[-1:]], device="cuda")
    return drawn
