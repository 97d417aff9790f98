"""Make the tiny target and the training data of ``tiny_cpu.yaml``.

``python recipes/make_tiny_target.py [ROOT]`` writes, below ROOT (demo_out):

    target/    a Llama of 8 layers with an untied head, and its tokenizer
    rows.jsonl sequences that the target sampled: token ids and loss mask
    data/      what ``speculators prepare-data`` makes of them, and the hidden
               states of the target for offline training

The same seed gives the same files. The target is random, not trained: its
residual stream is dominated by the current token and its head by a core of
frequent tokens, so the next token is peaked and mostly a function of the last
ones. A draft learns that in a minute on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
VOCAB_SIZE, WORDS = 512, 500
CORE = slice(5, WORDS, 4)  # the frequent tokens, spread over the vocabulary
AUX_LAYERS = (2, 4, 5)  # speculators' default for 8 layers: 2, n // 2, n - 3
PROMPT = 8


def make_target(folder: Path, seed: int = 0) -> None:
    """Write the target and a tokenizer of whole words ``t4`` ... ``t499``.

    Args:
        folder: Where to write a Hugging Face model folder (bfloat16, as real
            targets are).
        seed: Of the random weights.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
        head = model.lm_head.weight.normal_(std=0.1)
        head[CORE] = torch.randn_like(head[CORE]) * 0.8
        for layer in model.model.layers:  # norms far from one, as in real targets
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
            layer.post_attention_layernorm.weight.uniform_(0.5, 1.5)
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)

    vocab = SPECIAL | {f"t{i}": i for i in range(len(SPECIAL), WORDS)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=1024,
    ).save_pretrained(folder)


def sample_rows(
    target: Path, path: Path, rows: int, length: int, seed: int = 1
) -> None:
    """Let the target continue random prompts and write what it says.

    Args:
        target: The model folder.
        path: JSONL to write: ``input_ids`` and ``loss_mask`` of each row.
        rows: Number of sequences.
        length: Tokens of the longest one; the shortest has two thirds of it.
        seed: Of the prompts and of the sampling.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        len(SPECIAL), WORDS, (rows, PROMPT), generator=generator, dtype=torch.long
    )
    step, cache = ids, None
    with torch.no_grad():
        while ids.shape[1] < length:
            out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = out.logits[:, -1], out.past_key_values
            logits[:, : len(SPECIAL)] = logits[:, WORDS:] = -torch.inf
            step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, step], dim=1)
    sizes = torch.randint(length * 2 // 3, length + 1, (rows,), generator=generator)
    with path.open("w") as file:
        for row, size in zip(ids.tolist(), sizes.tolist(), strict=True):
            mask = [0] * PROMPT + [1] * (size - PROMPT)
            line = {"input_ids": row[:size], "loss_mask": mask}
            file.write(json.dumps(line) + "\n")


def prepare(target: Path, rows: Path, data: Path, length: int) -> None:
    """Run ``speculators prepare-data``; it needs no server for token ids.

    Args:
        target: The model folder.
        rows: The JSONL of ``sample_rows``.
        data: Folder to write the dataset and the token frequencies to.
        length: Tokens of the longest row.
    """
    from speculators.cli.prepare_data import prepare_data

    prepare_data(
        model=str(target),
        data=[str(rows)],
        output=str(data),
        seq_length=length,
        num_preprocessing_workers=1,
        skip_token_freq=False,
    )


def write_hidden_states(target: Path, data: Path, batch: int = 64) -> None:
    """Write the target's features for each row, in the ``file`` backend's format.

    A file holds ``token_ids`` (tokens) and ``hidden_states`` (tokens, auxiliary
    layers + 1, width) in bfloat16; the last slot is the input of the final norm,
    since speculators applies that norm itself.

    Args:
        target: The model folder.
        data: The folder of ``prepare``; files go to ``hidden_states/`` in it.
        batch: Rows per forward.
    """
    import torch
    from datasets import load_from_disk
    from safetensors.torch import save_file
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(
        lambda _module, args: before_norm.append(args[0])
    )
    folder = data / "hidden_states"
    folder.mkdir(exist_ok=True)
    rows = [row["input_ids"] for row in load_from_disk(str(data))]
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        before_norm.clear()
        with torch.no_grad():  # padding is on the right: causal rows do not see it
            out = model(
                pad_sequence(part, batch_first=True),
                output_hidden_states=True,
                logits_to_keep=1,
            )
        layers = [out.hidden_states[i] for i in AUX_LAYERS] + before_norm
        states = torch.stack(layers, dim=2).bfloat16()
        for offset, ids in enumerate(part):
            save_file(
                {
                    "token_ids": ids.clone(),
                    "hidden_states": states[offset, : len(ids)].contiguous(),
                },
                folder / f"hs_{start + offset}.safetensors",
            )


def make_all(root: Path, rows: int = 800, length: int = 64) -> None:
    """Make everything below ``root``.

    Args:
        root: Folder to create; what is already complete is kept.
        rows: Number of sequences.
        length: Tokens of the longest one.
    """
    done = root / "complete.json"
    wanted = {"rows": rows, "length": length, "version": 2}
    if done.is_file() and json.loads(done.read_text()) == wanted:
        return
    root.mkdir(parents=True, exist_ok=True)
    target, data = root / "target", root / "data"
    make_target(target)
    sample_rows(target, root / "rows.jsonl", rows, length)
    prepare(target, root / "rows.jsonl", data, length)
    write_hidden_states(target, data)
    done.write_text(json.dumps(wanted))


def main() -> None:
    """Parse the command line and make the files."""
    parser = argparse.ArgumentParser(description="Make the tiny target and its data.")
    parser.add_argument("root", nargs="?", type=Path, default=Path("demo_out"))
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    make_all(options.root, options.rows, options.length)
    print(f"target and data are in {options.root}")


if __name__ == "__main__":
    # Tiny matrices: more threads only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
