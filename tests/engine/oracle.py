"""What transformers makes of a real model's prompts, in a process of its own: it probes for a package `kernels`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
found = []
for ids in json.loads(sys.argv[2]):
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, repetition_penalty=1.0,
                             max_new_tokens=int(sys.argv[3]), min_new_tokens=int(sys.argv[3]))
    found.append(out[0, len(ids):].tolist())
print(json.dumps(found))
"""


def greedy_ids(model: Path, prompts: list[list[int]], num_new: int, scratch: Path) -> list[list[int]]:
    """The `num_new` ids that continue each prompt in float32; ids that end are masked."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(model), json.dumps(prompts), str(num_new)]
    found: list[list[int]] = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=scratch).stdout)
    return found
