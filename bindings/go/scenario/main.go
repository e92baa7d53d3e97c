// SPDX-License-Identifier: Apache-2.0

// Command scenario does what tests/c/scenario.c does, and prints the same.
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"

	"bifolio"
)

const (
	numLayers, numQHeads, numKVHeads, headDim, vocab = 2, 4, 2, 8, 50
	fnvStart                                         = uint64(0xcbf29ce484222325)
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

func fnv(hash uint64, bytes []byte) uint64 {
	for _, b := range bytes {
		hash = (hash ^ uint64(b)) * 0x100000001b3
	}
	return hash
}

func fnv32(hash uint64, values []uint32) uint64 {
	for _, value := range values {
		hash = fnv(hash, binary.LittleEndian.AppendUint32(nil, value))
	}
	return hash
}

func bitsOf(values []float32) []uint32 {
	bits := make([]uint32, len(values))
	for i, value := range values {
		bits[i] = math.Float32bits(value)
	}
	return bits
}

func rowsOf(what uint64, layer int32, numHeads int, step *bifolio.Step) []float32 {
	rows := []float32{}
	for t, token := range step.Tokens {
		for i := int32(0); i < int32(numHeads*headDim); i++ {
			h := mix(what)
			for _, part := range []int32{layer, token, step.Positions[t], i} {
				h = mix(h ^ uint64(int64(part)))
			}
			rows = append(rows, float32(h>>40)*(1.0/8388608.0)-1.0)
		}
	}
	return rows
}

func runLayers(step *bifolio.Step) (uint64, []float32) {
	hash, out := fnvStart, []float32{}
	for layer := int32(0); layer < numLayers; layer++ {
		q, k, v := rowsOf(0, layer, numQHeads, step), rowsOf(1, layer, numKVHeads, step), rowsOf(2, layer, numKVHeads, step)
		out = make([]float32, len(q))
		must(step.Attend(int(layer), q, k, v, out))
		hash = fnv32(hash, bitsOf(out))
	}
	return hash, out
}

func say(manager *bifolio.Manager, what string, hash uint64) {
	must(manager.Check())
	digest, err := manager.Digest()
	must(err)
	fmt.Printf("%s %016x %016x\n", what, hash, digest)
}

func runRows(cache *bifolio.Cache, manager *bifolio.Manager) {
	stepOf := func(what string, accepted []int32, rows ...bifolio.Row) {
		step, err := cache.Begin(rows...)
		must(err)
		hash, _ := runLayers(step)
		must(step.Commit(accepted...))
		say(manager, what, hash)
	}
	prompt := []int32{}
	for i := int32(0); i < 10; i++ {
		prompt = append(prompt, i*7%vocab)
	}
	a, _, err := cache.Open(prompt, []byte("tenant"))
	must(err)
	stepOf("prefill", nil, bifolio.Row{Seq: a, Tokens: prompt})
	for token := int32(1); token <= 3; token++ {
		stepOf("decode", nil, bifolio.Row{Seq: a, Tokens: []int32{token}})
	}
	b, err := cache.Fork(a)
	must(err)
	stepOf("fork", nil, bifolio.Row{Seq: a, Tokens: []int32{4}}, bifolio.Row{Seq: b, Tokens: []int32{5}})
	stepOf("drafts", []int32{1}, bifolio.Row{Seq: a, Tokens: []int32{6, 7, 8}})
	must(cache.Free(a))
	must(cache.Free(b))
	again, cached, err := cache.Open(prompt, []byte("tenant"))
	must(err)
	fmt.Printf("cached %d\n", cached)
	stepOf("hit", nil, bifolio.Row{Seq: again, Tokens: prompt[cached:]})
	must(cache.SwapOut(again))
	say(manager, "out", 0)
	must(cache.SwapIn(again))
	stepOf("in", nil, bifolio.Row{Seq: again, Tokens: []int32{7}})
	must(cache.Free(again))
	hits, lookedUp, err := manager.PrefixHits()
	must(err)
	fmt.Printf("prefix %d of %d\n", hits, lookedUp)
}

func runScheduler(cache *bifolio.Cache, manager *bifolio.Manager) {
	scheduler, err := bifolio.NewScheduler(manager,
		bifolio.SchedulerConfig{MaxTokensPerStep: 16, MaxRunning: 8, VocabSize: vocab, Swap: true})
	must(err)
	for r := int32(0); r < 6; r++ {
		tokens := []int32{}
		for i := int32(0); i < 3+7*r; i++ {
			tokens = append(tokens, (r*13+i*7)%vocab)
		}
		samples := 1
		if r == 1 {
			samples = 2
		}
		_, err := scheduler.Submit(bifolio.Request{Tokens: tokens, MaxNewTokens: 24, NumSamples: samples, Priority: int(r % 2)})
		must(err)
	}
	hash, numSteps, numFinished := fnvStart, 0, 0
	for ; ; numSteps++ {
		if numSteps == 20 {
			must(scheduler.PostAbort(4))
		}
		step, err := cache.BeginScheduled(scheduler)
		must(err)
		if step == nil {
			break
		}
		ofStep, out := runLayers(step)
		hash = fnv(hash, binary.LittleEndian.AppendUint64(nil, ofStep))
		sampled, at := []bifolio.Sampled{}, 0
		for _, row := range step.Rows {
			// The samples of a prompt that is complete differ; they come from one row.
			for k := 0; k < row.NumSamples; k++ {
				first := int(step.SampleRows[at]) * numQHeads * headDim
				h := fnv32(fnvStart+uint64(k), bitsOf(out[first:first+numQHeads*headDim]))
				sampled = append(sampled, bifolio.Sampled{Token: int32(h % vocab), Stop: h%97 == 0})
			}
			if row.NumSamples > 0 {
				at++
			}
		}
		finished, err := step.CommitSampled(sampled)
		must(err)
		for _, done := range finished {
			numFinished++
			stopped := 0
			if done.Stopped {
				stopped = 1
			}
			bits := make([]uint32, len(done.Tokens))
			for i, token := range done.Tokens {
				bits[i] = uint32(token)
			}
			fmt.Printf("finished %d %d %d %d %016x\n", done.Request, done.Sample, stopped, len(done.Tokens), fnv32(fnvStart, bits))
		}
	}
	must(scheduler.Check())
	stats, err := scheduler.Stats()
	must(err)
	digest, err := scheduler.Digest()
	must(err)
	fmt.Printf("steps %d, finished %d, preemptions %d, swapped in %d, aborted %d\n", numSteps, numFinished,
		stats.Preemptions, stats.SwapIns, stats.Aborted)
	fmt.Printf("scheduler %016x %016x\n", hash, digest)
	scheduler.Close()
	say(manager, "end", 0)
}

func main() {
	backend, err := bifolio.NewBackend("cpu", 0, "serial")
	must(err)
	cache, err := bifolio.NewCache(backend, bifolio.Config{NumLayers: numLayers, NumQHeads: numQHeads,
		NumKVHeads: numKVHeads, HeadDim: headDim, BlockSize: 4, NumBlocks: 18, NumHostBlocks: 40, MaxSequences: 64,
		PrefixCaching: true, Seed: &[2]uint64{1, 2}, FirstGeneration: 1})
	must(err)
	manager, err := cache.Manager()
	must(err)
	backend.Close() // the cache keeps what it needs
	runRows(cache, manager)
	runScheduler(cache, manager)
	cache.Close()
	manager.Close()
}
