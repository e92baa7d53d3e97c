# SPDX-License-Identifier: Apache-2.0
"""Batches of events as routers read them: through ZeroMQ, with lost batches, and by Dynamo's indexer where it is
installed (ai-dynamo-runtime)."""

import importlib.util
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import bifolio as bf
import pytest

BLOCK = 4


def make(blocks=40):
    return bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=blocks, block_size=BLOCK, prefix=True, events=True,
                    threads=1)


def run(cache, prompt):
    sequence = cache.open(prompt)
    if sequence.pending:
        with cache.step([sequence]):
            pass
    sequence.free()


def matched(cache, prompt):
    """Tokens in whole blocks that the cache has of a prompt. It keeps at least one token to compute, so one more is asked for."""
    sequence = cache.open([*prompt, 0])
    sequence.free()
    return sequence.num_cached // BLOCK * BLOCK


class Listener:
    """A router's tree, from decoded batches."""

    def __init__(self):
        self.blocks = {}  # hash: all tokens up to the block's end

    def read(self, events):
        for kind, *rest in events:
            if kind == "AllBlocksCleared":
                self.blocks = {}
            elif kind == "BlockRemoved":
                for name in rest[0]:
                    self.blocks.pop(name, None)
            else:
                assert kind == "BlockStored"
                names, parent, tokens, size, _, medium = rest
                assert size == BLOCK and medium == "GPU"
                if parent is not None and parent not in self.blocks:
                    continue
                before = () if parent is None else self.blocks[parent]
                for i, name in enumerate(names):
                    before += tuple(tokens[i * size:(i + 1) * size])
                    self.blocks[name] = before

    def match(self, prompt):
        known = set(self.blocks.values())
        return max((n for n in range(0, len(prompt) + 1, BLOCK) if n == 0 or tuple(prompt[:n]) in known), default=0)


def prompts(count, seed=7):
    source = random.Random(seed)
    return [[source.randrange(3) for _ in range(source.randrange(1, 30))] for _ in range(count)]


def test_events_need_to_be_recorded():
    cache = bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=4, prefix=True)
    with pytest.raises(bf.Error, match="records no events"):
        cache.drain_events()


def test_a_client_of_zeromq_and_msgpack_knows_what_the_cache_has_also_when_batches_are_lost():
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
    context = zmq.Context()
    publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    subscriber.setsockopt(zmq.RCVTIMEO, 10000)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    while True:  # until the subscription is there
        publisher.send_multipart([b"", struct.pack(">q", 0), b""])
        if subscriber.poll(10):
            break
    while subscriber.poll(50):
        subscriber.recv_multipart()
    cache, listener, source = make(), Listener(), random.Random(3)
    sent, expected = [b""], 1  # batches by number, for replays
    for prompt in prompts(600):
        run(cache, prompt)
        sent.append(cache.drain_events())
        if source.random() >= 0.01:  # else it is lost
            publisher.send_multipart([b"", struct.pack(">q", len(sent) - 1), sent[-1]])
            number = b""
            while number != struct.pack(">q", len(sent) - 1):  # behind what is left from before
                _, number, _ = subscriber.recv_multipart()
            while expected <= struct.unpack(">q", number)[0]:
                timestamp, events, rank = msgspec.msgpack.decode(sent[expected])
                assert abs(timestamp - time.time()) < 600 and rank == 0
                listener.read(events)
                expected += 1
            assert listener.match(prompt) == matched(cache, prompt)
    late = Listener()
    late.read(msgspec.msgpack.decode(cache.list_events())[1])
    cache.drain_events()
    for prompt in prompts(200, seed=8):
        assert late.match(prompt) == matched(cache, prompt)
        late.read(msgspec.msgpack.decode(cache.drain_events())[1])  # what the look-up itself evicted
    context.destroy(0)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def post(port, path, what):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(what).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo-runtime is not installed")
def test_dynamos_indexer_finds_the_match_lengths_of_the_cache():
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    source_port, port = publisher.bind_to_random_port("tcp://127.0.0.1"), free_port()
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(port),
                                "--threads", "1", "--workers", f"1=tcp://127.0.0.1:{source_port}"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    number = time.time_ns() // 1000
    cache = make(200)

    def send(batch):
        nonlocal number
        publisher.send_multipart([b"", struct.pack(">Q", number), batch])
        number += 1

    def known(prompt):
        answer = post(port, "/query", dict(token_ids=prompt, model_name="default"))
        scores = answer.get("scores", {})
        return max((v for worker in scores.values() for v in (worker.values() if isinstance(worker, dict) else [worker])),
                   default=0)

    try:
        for _ in range(300):
            try:
                post(port, "/query", dict(token_ids=[1], model_name="default"))
                break
            except OSError:
                time.sleep(0.1)
        run(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        send(cache.list_events())
        cache.drain_events()
        for _ in range(100):  # until it listens
            if known([1, 2, 3, 4, 5, 6, 7, 8]) > 0:
                break
            time.sleep(0.1)
            send(cache.list_events())
        unit = known([1, 2, 3, 4, 5, 6, 7, 8]) / 8  # it counts tokens or blocks
        assert unit > 0
        for i, prompt in enumerate(prompts(int(os.environ.get("BIFOLIO_INDEXER_PROMPTS", "2000")))):
            run(cache, prompt)
            send(cache.drain_events())
            if i % 50 == 49:
                want = matched(cache, prompt)
                for _ in range(100):
                    if known(prompt) == want * unit:
                        break
                    time.sleep(0.02)
                assert known(prompt) == want * unit
    finally:
        indexer.kill()
        indexer.wait()
        context.destroy(0)
