"""Real keys, what a small language model's cache holds after one prompt; records of awkward shapes."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from .helpers import make_config
from .records import make_record

PROSE = """\
The ferry left the island at seven, an hour before the fog came down. Marta had counted the crates twice: forty of
apples, eleven of cheese, and one long box that nobody had claimed and that the harbour master wanted gone. Her brother
sat on it and wrote letters, or pretended to. He had promised their mother to ask about the lighthouse, whether it was
for sale, and what the roof would cost, but the keeper had only laughed and offered them coffee. "You may buy the lamp,"
he said, "and I shall keep the stairs." In the spring of that year three ships had missed the channel. The first
carried salt, the second carried clocks, and the third, as the newspapers were careful to say, carried nothing at all.

When the fog lifted they could see the mainland again, lower and greyer than before. A customs officer came aboard and
asked for the list. Marta gave him the list, and then, because he did not look at it, she told him about the box. He
knocked on it with his pencil. It gave back a sound like a drum that has been left out in the rain. "Books," said the
brother, without looking up. "Then there is a duty of four crowns," said the officer, who had daughters and knew what
books were for. They paid him in apples. By noon the crates were on the quay, the horse had been found, and the long
box lay alone in the sun, with a number chalked on its side that neither of them had written: 8317.

Years later, when the lighthouse had become a hotel, Marta would tell her guests that the number was a date, or a depth,
or the price of the roof. Her brother, who by then had a beard and two languages more, said that it was only a number,
that the sea is full of them, and that anyone who had ever counted crates in the fog would know how easily one number
is taken for another. The box itself stood in the hall. It had never been opened. Some evenings, when the wind was from
the west, it drummed a little by itself.
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are small: on a busy machine, threads would wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class RealLayer:
    """One layer's attention, fp32: query and output (kv heads, G, T, d), keys and values (kv heads, T, d) as cached."""

    query: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    scale: float

    def pages(self, page_size=16):
        """The keys as complete pages (kv heads, P, page_size, d)."""
        count = self.keys.shape[-2] // page_size
        return self.keys[:, : count * page_size].unflatten(1, (count, page_size))

    def last_queries(self, count):
        """(kv heads, count * G, d): the group's heads at the last `count` positions, side by side."""
        return self.query[:, :, -count:].flatten(1, 2)


@pytest.fixture(scope="session")
def real_layers():
    """layer index -> RealLayer, of SmolLM2-135M-Instruct on a page of prose."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from pagelocks.models import fetch

    path = fetch("SmolLM2-135M-Instruct")
    wanted, recorded = (0, 9, 20, 29), {}

    def recording(module, query, key, value, attention_mask, scaling, **others):
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        if module.layer_idx in wanted:
            recorded[module.layer_idx] = query, output.transpose(1, 2), scaling
        return output, weights

    transformers.AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", sdpa_mask)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="recording"
    )
    tokens = tokenizer(PROSE, return_tensors="pt")["input_ids"]
    assert 300 <= tokens.shape[-1] <= 600
    with torch.inference_mode():
        cache = model.model(tokens, use_cache=True).past_key_values
    layers = {}
    for index in wanted:
        query, output, scale = recorded[index]
        keys, values = cache.layers[index].keys[0].clone(), cache.layers[index].values[0].clone()
        # Consecutive query heads share a KV head.
        query, output = (part[0].unflatten(0, (keys.shape[0], -1)).clone() for part in (query, output))
        layers[index] = RealLayer(query, keys, values, output, scale)
    return layers


SHAPES = [  # heads, group, length, head_dim, page_size
    (2, 3, 75, 32, 8),  # a partial last page
    (1, 1, 64, 64, 16),  # none
    (3, 2, 9, 32, 8),  # one complete page, one token more
    (2, 4, 129, 32, 64),
]


@pytest.fixture(params=SHAPES, ids=str)
def shaped(request):
    """A record of this shape and a configuration for it."""
    heads, group, length, head_dim, page_size = request.param
    record = make_record(sum(request.param), heads, group, length, head_dim, page_size=page_size)
    return record, make_config(rank=3, page_size=page_size, budget_pages=3)
