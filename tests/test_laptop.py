"""docs/SERVING.md on a laptop: the merged text model through llama.cpp, against vLLM.

LLAMA_CPP names a checkout of llama.cpp that has `v/bin/python`, a Python with `gguf` and
`llama-cpp-python`; the converter runs in .venv-serve, which has PyTorch. The tiny tokenizer is
byte-level and not Gemma's, so llama.cpp's converter refuses its vocabulary ("Cannot find Llama BPE
tokenizer"): here ids go in and come out, and we compare the weights and the arithmetic.
"""

import json
import os
from pathlib import Path

import pytest
from conftest import ROOT, SERVE, program, serve

from helpers import chat

LLAMA = Path(os.environ.get("LLAMA_CPP") or "/nowhere")
MODEL = ROOT / "assets" / "tiny_gemma4"
CONVERT = """
import runpy, sys
root, model, out, kind = sys.argv[1:]
sys.path[:0] = [root, root + "/gguf-py"]
from conversion import gemma
gemma.Gemma4Model.set_vocab = lambda self: (
    self._set_vocab_none(), self.gguf_writer.add_vocab_size(self.hparams["vocab_size"]))
sys.argv = ["convert", model, "--outfile", out, "--outtype", kind]
runpy.run_path(root + "/convert_hf_to_gguf.py", run_name="__main__")
"""
GREEDY = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, job = sys.argv[1], json.load(sys.stdin)
llama, found = Llama(model, n_ctx=1024, verbose=False, logits_all=True), []
for ids in job["prompts"]:
    llama.reset()
    llama.eval(ids)
    found.append([])
    while len(found[-1]) < job["max_tokens"]:
        found[-1].append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
        if found[-1][-1] in job["stops"]:
            break
        llama.eval(found[-1][-1:])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (LLAMA / "convert_hf_to_gguf.py").exists() or not SERVE.exists(),
    reason="LLAMA_CPP names no checkout of llama.cpp, or no .venv-serve",
)
@pytest.mark.parametrize("kind, least", [("f32", 1.0), ("q8_0", 0.8)])
def test_greedy_answers_of_the_gguf_are_those_of_vllm(tmp_path, kind, least):
    tokenizer = chat.load_tokenizer(MODEL)
    prompts = [
        chat.prompt_ids(tokenizer, [{"role": "user", "content": path.read_text().strip()}])
        for path in sorted((ROOT / "data/tiny_eval").glob("*_prompt.txt"))[:6]
    ]
    prompts += [
        tokenizer.encode("module TopModule(input a, output b);"),
        tokenizer.encode("always @(posedge clk)"),
    ]
    stops = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    job = {"model": str(MODEL), "prompts": prompts, "max_tokens": 32, "stops": stops}
    (tmp_path / "job.json").write_text(json.dumps(job))
    serve("tests/greedy_vllm.py", tmp_path / "job.json", tmp_path / "vllm.json")
    serve("-c", CONVERT, LLAMA, MODEL, tmp_path / "tiny.gguf", kind)
    done = program(
        LLAMA / "v/bin/python", "-c", GREEDY, tmp_path / "tiny.gguf", stdin=json.dumps(job)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = json.loads((tmp_path / "vllm.json").read_text()), json.loads(done.stdout)
    same = tokens = same_tokens = 0
    for ours_ids, theirs_ids in zip(ours, theirs, strict=True):
        same += ours_ids == theirs_ids
        for our_id, their_id in zip(ours_ids, theirs_ids):
            tokens += 1
            same_tokens += our_id == their_id
    print(f"{kind}: {same} of {len(ours)} answers, {same_tokens} of {tokens} tokens alike")
    assert same >= least * len(ours)
