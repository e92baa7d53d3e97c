# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, made on the spot with random weights: greedy ids are those of transformers itself."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import bifolio as bf  # noqa: E402
import bifolio.hf  # noqa: E402

COMMON = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
              initializer_range=0.5)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "mistral with a window": lambda: transformers.MistralConfig(**COMMON, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen2 with windows in its upper layers": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "gemma2 with soft cap": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=16, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, sliding_window=5, tie_word_embeddings=False),
}


def model_of(name, dtype=torch.float32):
    torch.manual_seed(len(name))
    plain = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager").to(dtype).eval()
    ours = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="bifolio").to(dtype).eval()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def make(model, **options):
    return bf.hf.Cache(model, blocks=120, block_size=4, threads=1, **options)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_are_those_of_transformers(name):
    plain, ours = model_of(name)
    prompt = torch.tensor([[5, 9, 33, 61, 12, 7, 7, 80, 3, 44, 21]])
    options = dict(max_new_tokens=14, do_sample=False)
    want = plain.generate(prompt, **options)
    cache = make(ours)
    got = ours.generate(prompt, past_key_values=cache, **options)
    assert got.tolist() == want.tolist() and len(set(want[0].tolist())) > 12
    assert cache.get_seq_length() == 11 + 13 and "1 sequences of 24 positions" in repr(cache)
    # A batch with padding, whose blocks are those of real tokens alone.
    batch = torch.tensor([[0, 0, 0, 5, 9], [4, 8, 15, 16, 23], [0, 42, 17, 3, 2]])
    mask = (batch != 0).long()
    want = plain.generate(batch, attention_mask=mask, **options)
    cache = make(ours)
    got = ours.generate(batch, attention_mask=mask, past_key_values=cache, **options)
    assert got.tolist() == want.tolist()
    assert cache.paged.stats().cache.num_tokens == int(mask.sum()) + 3 * 13
    cache.paged.check()
    cache.reset()
    assert cache.paged.stats().cache.num_used_blocks == 0


def test_logits_agree_and_prompts_may_come_in_chunks():
    plain, ours = model_of("gemma2 with soft cap")
    prompt = torch.arange(1, 31)[None]
    with torch.no_grad():
        want = plain(prompt).logits
        cache = make(ours)
        parts = [ours(prompt[:, i:i + 10], past_key_values=cache).logits for i in range(0, 30, 10)]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=2e-4, rtol=2e-4)


def test_beams_fork_and_crop_takes_tokens_back():
    plain, ours = model_of("llama")
    prompt = torch.tensor([[5, 9, 33, 61]])
    options = dict(max_new_tokens=12, do_sample=False, num_beams=3)
    cache = make(ours)
    assert ours.generate(prompt, past_key_values=cache, **options).tolist() == plain.generate(prompt, **options).tolist()
    assert cache.paged.stats().cache.num_forks > 0
    cache = make(ours)
    with torch.no_grad():
        ours(torch.tensor([[5, 9, 33, 61, 2, 2, 2]]), past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 4
        got = ours(torch.tensor([[7, 8]]), past_key_values=cache).logits
        want = plain(torch.tensor([[5, 9, 33, 61, 7, 8]])).logits[:, 4:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_forward_pass_that_failed_is_taken_back():
    plain, ours = model_of("llama")
    cache = make(ours)

    def fail(*arguments):
        raise ZeroDivisionError

    hook = ours.model.layers[2].register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            ours(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        hook.remove()
        got = ours(torch.tensor([[4, 5]]), past_key_values=cache).logits
        torch.testing.assert_close(got, plain(torch.tensor([[4, 5]])).logits, atol=1e-4, rtol=1e-4)


def test_bfloat16_runs_and_refusals_say_why():
    _, ours = model_of("qwen2", torch.bfloat16)
    out = ours.generate(torch.tensor([[5, 9, 33]]), past_key_values=make(ours), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 11)
    cache = make(ours)
    with torch.no_grad():
        with pytest.raises(bf.Error, match="needs past_key_values"):
            ours(torch.tensor([[1]]), use_cache=False)
        ours(torch.tensor([[1], [2]]), past_key_values=cache)
        with pytest.raises(bf.Error, match="the batch has 1 rows; the cache holds 2"):
            ours(torch.tensor([[1]]), past_key_values=cache)
        with pytest.raises(bf.OutOfBlocks):
            ours(torch.ones(1, 200, dtype=torch.long), past_key_values=bf.hf.Cache(ours, blocks=2, threads=1))


def test_sequences_that_cannot_be_opened_or_forked_leave_none_behind():
    _, ours = model_of("llama")
    cache = make(ours, max_sequences=3)
    batch = torch.tensor([[5, 9, 33], [4, 8, 15]])
    with torch.no_grad():
        with pytest.raises(bf.OutOfBlocks):
            ours(torch.cat([batch, batch]), past_key_values=cache)
        assert cache.paged.stats().cache.num_sequences == 0
        ours(batch, past_key_values=cache)
        before = repr(cache)
        with pytest.raises(bf.OutOfBlocks):
            cache.batch_repeat_interleave(2)  # one fork of the two has room
        assert cache.paged.stats().cache.num_sequences == 2 and repr(cache) == before
        logits = ours(batch[:, :1], past_key_values=cache).logits
    assert bool(torch.isfinite(logits).all())
    cache.reset()
    assert cache.paged.stats().cache.num_used_blocks == 0
    cache.paged.check()
