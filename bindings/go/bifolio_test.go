// SPDX-License-Identifier: Apache-2.0

package bifolio

import (
	"strings"
	"testing"
)

func tiny(t *testing.T) *Cache {
	backend, err := NewBackend("cpu", 0, "serial")
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close() // the cache keeps what it needs
	cache, err := NewCache(backend, Config{NumLayers: 1, NumQHeads: 2, NumKVHeads: 1, HeadDim: 4, NumBlocks: 4})
	if err != nil {
		t.Fatal(err)
	}
	return cache
}

func expect(t *testing.T, err error, part string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("expected an error with '%s', got %v", part, err)
	}
}

func TestRefusalsHaveTheSentenceOfTheLibrary(t *testing.T) {
	_, err := NewBackend("gpu", 0, "")
	expect(t, err, "cpu")
	cache := tiny(t)
	expect(t, cache.Free(7), "not_found")
	seq, _, err := cache.Open([]int32{1, 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = cache.Begin(Row{seq, make([]int32, 65)}); err != ErrNever {
		t.Errorf("expected ErrNever, got %v", err)
	}
	_, err = cache.Begin(Row{seq, nil})
	expect(t, err, "0 tokens")
	step, err := cache.Begin(Row{seq, []int32{1, 2}})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, cache.Free(seq), "part of a step")
	expect(t, step.Attend(0, make([]float32, 8), make([]float32, 8), make([]float32, 8), make([]float32, 16)), "elements")
	expect(t, step.Attend(3, make([]float32, 16), make([]float32, 8), make([]float32, 8), make([]float32, 16)), "out_of_range")
	step.Close()
	expect(t, step.Commit(), "not_found")
	cache.Close()
	expect(t, cache.Free(seq), "not_found")
}

func TestAStepThatIsClosedGivesItsSlotsBack(t *testing.T) {
	cache := tiny(t)
	defer cache.Close()
	manager, err := cache.Manager()
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	seq, _, _ := cache.Open([]int32{1, 2}, nil)
	dropped, err := cache.Begin(Row{seq, []int32{1, 2, 3, 4}})
	if err != nil {
		t.Fatal(err)
	}
	dropped.Close()
	step, err := cache.Begin(Row{seq, []int32{1, 2, 3}})
	if err != nil {
		t.Fatal(err)
	}
	kv, out := make([]float32, 12), make([]float32, 24)
	for i := range kv {
		kv[i] = 3
	}
	if err = step.Attend(0, make([]float32, 24), kv, kv, out); err != nil || out[23] != 3 {
		t.Errorf("%v, %v", err, out)
	}
	if err = step.Commit(2); err != nil {
		t.Error(err)
	}
	if tokens, committed, _ := manager.NumTokens(seq); tokens != 2 || committed != 2 {
		t.Errorf("%d tokens, %d committed", tokens, committed)
	}
}
