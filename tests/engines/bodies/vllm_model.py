"""A small Llama with random weights in vLLM, tensor parallel: python -m tests.engines.bodies.vllm_model FOLDER RANKS.

Prints as JSON the tokens and, for each worker, the number of calls of each collective that the kernels ran.
"""

from __future__ import annotations

import json
import sys

VOCABULARY = 128


class Counting:
    """A method that vLLM adds to its workers."""

    def calls_of_tricomm(self):
        if "tricomm" not in sys.modules:
            return {}
        import tricomm

        return dict(tricomm.stats()["kernels"])


def make(folder: str) -> None:
    """Deterministic weights and a configuration; no tokenizer, because prompts are token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def main(folder: str, world_size: str, eager: str = "eager") -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(world_size),
        dtype="float32",
        enforce_eager=eager == "eager",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        worker_extension_cls=f"{Counting.__module__}.{Counting.__name__}",
    )
    prompts = [{"prompt_token_ids": [3, 17, 42]}, {"prompt_token_ids": [99, 5, 6, 7, 8]}]
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    tokens = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, asked, use_tqdm=False)]
    counts = llm.collective_rpc("calls_of_tricomm")
    print("RESULT " + json.dumps({"tokens": tokens, "calls": counts}), flush=True)


if __name__ == "__main__":
    from tests.engines.bodies import vllm_model  # workers find the class there, not in __main__

    vllm_model.main(*sys.argv[1:])
