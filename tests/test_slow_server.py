"""serving.server.slow_paths: lines that vLLM and tpu-inference write, with the ones beside them."""

import pytest

from serving import server

HEALTHY = ("INFO 08-16 20:24:55 [kv_cache_manager.py:1] Init kv-cache | num_total_layers=60 | "
           "regular_attn_layers=60 | regular_attn_dtype=bfloat16 | hbm=[(14.5, 15.75)]Gb\n"
           "INFO 08-16 20:24:56 [compilation_manager.py:137] Precompile worker0 backbone\n")
TRITON = ("(APIServer pid=1) INFO 04-19 10:59:02 [config.py:101] Gemma4 model has heterogeneous "
          "head dimensions (head_dim=256, global_head_dim=512). Forcing TRITON_ATTN backend to "
          "prevent mixed-backend numerical divergence.\n")
NEWER = ("\x1b[36mGemma4 model has heterogeneous head dimensions {'sliding_attention': 256}. FA4 "
         "not available, forcing \x1b[0mTRITON_ATTN backend.\n")
FP8 = "INFO [cache.py:296] Automatically using fp8_e5m2 for FP8 KV cache on TPU v6e\n"


@pytest.mark.parametrize("log, words", [
    ("", []), (HEALTHY, []), (TRITON + HEALTHY, ["TRITON_ATTN"]), (NEWER, ["TRITON_ATTN"]),
    (FP8 + HEALTHY, ["bfloat16"]), (FP8 + HEALTHY.replace("bfloat16", "float8_e4m3fn"), []),
    (TRITON + FP8 + HEALTHY, ["TRITON_ATTN", "bfloat16"])])
def test_a_log_gives_slow_paths_away(tmp_path, log, words):
    path = tmp_path / "server.log"
    path.write_text(log)
    told = server.slow_paths(path)
    assert len(told) == len(words) and all(word in text for word, text in zip(words, told))
    assert server.slow_paths(tmp_path / "missing.log") == []
