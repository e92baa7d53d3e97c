# SPDX-License-Identifier: Apache-2.0
"""Batches of events as routers read them: through ZeroMQ, with lost batches, and by Dynamo's indexer where it is
installed (ai-dynamo-runtime)."""

import http.client
import importlib.util
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time

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


class HttpError(Exception):
    """An answer that says no."""


class Http:
    """One connection to a server of this machine, for as many requests as one likes."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def post(self, path, what):
        try:
            self.connection.request("POST", path, json.dumps(what), {"Content-Type": "application/json"})
            answer = self.connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            raise
        if answer.status >= 300:
            raise HttpError(answer.status)
        return json.loads(text or b"null")


class Worker:
    """A worker as a router sees it: batches over ZeroMQ with numbers that grow, of which one in a hundred is lost, and
    replays of those that are asked for, in the form of vLLM's and of `kv_event_publisher`."""

    def __init__(self, zmq, context, lose):
        self.zmq, self.context, self.lose = zmq, context, random.Random(lose)
        self.sockets = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in self.sockets]
        self.number, self.kept, self.num_lost, self.num_replays = 0, [], 0, 0
        self.restart()

    def restart(self):
        """A new process: its numbers go on from the time, and it has nothing of the one before."""
        self.number, self.kept = max(time.time_ns() // 1000, self.number), []

    def send(self, batch, may_be_lost=True):
        self.kept.append((self.number, batch))
        if may_be_lost and self.lose.random() < 0.01:
            self.num_lost += 1
        else:
            self.sockets[0].send_multipart([b"", struct.pack(">Q", self.number), batch])
        self.number += 1
        self.answer()

    def answer(self):
        while self.sockets[1].poll(0):
            frames = self.sockets[1].recv_multipart()
            self.num_replays += 1
            for number, batch in self.kept:
                if number >= struct.unpack(">Q", frames[-1])[0]:
                    self.sockets[1].send_multipart([frames[0], b"", struct.pack(">Q", number), batch])
            self.sockets[1].send_multipart([frames[0], b"", struct.pack(">q", -1), b""])


class Indexer:
    """Dynamo's, in a process of its own."""

    def __init__(self, *arguments):
        self.port = free_port()
        self.process = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port",
                                         str(self.port), "--threads", "1", *arguments],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        self.http = Http(self.port)
        for _ in range(300):
            try:
                self.http.post("/query", dict(token_ids=[1], model_name="default"))
                return
            except HttpError:
                return  # it listens, and knows no model yet
            except OSError:
                time.sleep(0.1)

    def known(self, prompt):
        try:
            answer = self.http.post("/query", dict(token_ids=prompt, model_name="default"))
        except HttpError:
            return 0
        scores = answer.get("scores", {})
        return max((v for worker in scores.values() for v in (worker.values() if isinstance(worker, dict) else [worker])),
                   default=0)

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo-runtime is not installed")
def test_dynamos_indexer_finds_the_match_lengths_of_the_cache_also_with_lost_batches_and_after_a_restart():
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    context = zmq.Context()
    worker, indexer = Worker(zmq, context, lose=5), Indexer()
    first = [1, 2, 3, 4, 5, 6, 7, 8]

    def wait_until(condition, resend=None):
        for i in range(2000):
            worker.answer()
            if condition():
                return True
            if resend is not None and i % 100 == 99:
                worker.send(resend(), may_be_lost=False)
            time.sleep(0.0002 if i < 50 else 0.002)
        return False

    try:
        indexer.http.post("/register", dict(instance_id=1, endpoint=f"tcp://127.0.0.1:{worker.ports[0]}",
                                             replay_endpoint=f"tcp://127.0.0.1:{worker.ports[1]}", model_name="default",
                                             block_size=BLOCK))
        cache, unit = make(200), 0
        run(cache, first)
        worker.send(cache.list_events(), may_be_lost=False)
        cache.drain_events()
        assert wait_until(lambda: indexer.known(first) > 0, cache.list_events)  # until it listens
        unit = indexer.known(first) / 8  # it counts tokens or blocks
        everyone = prompts(int(os.environ.get("BIFOLIO_INDEXER_PROMPTS", "2000")))
        for i, prompt in enumerate(everyone):
            if i == len(everyone) // 2:  # a new process begins with "all cleared", and has nothing
                worker.restart()
                cache = make(200)
                worker.send(cache.list_events(), may_be_lost=False)
            run(cache, prompt)
            worker.send(cache.drain_events())
            worker.send(cache.drain_events(), may_be_lost=False)  # a gap shows when something comes after it
            want = matched(cache, prompt) * unit
            assert wait_until(lambda: indexer.known(prompt) == want), (i, indexer.known(prompt), want)
        assert worker.num_lost > 0 and worker.num_replays > 0
    finally:
        indexer.end()
        context.destroy(0)
