package nsq

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// What a handler keeps for ever, a body or a whole message, pins no more than 64 KiB of others. One is kept out of so many
// that those in between have four times as much, in whatever way they share memory. What is measured is what can be reached
// when all the others are gone: it does not depend on when collections happen.
func TestWhatAHandlerKeepsPinsLittle(t *testing.T) {
	if raceDetector {
		t.Skip("measures memory, of which the race detector takes some for each message: run it without -race")
	}
	const (
		kept     = 40
		pinned   = 64 << 10
		overhead = 256 // what a message takes beside its body, at least
	)
	keepers := map[string]func(m *Message) any{
		"a body":    func(m *Message) any { return m.Body },
		"a message": func(m *Message) any { return m },
	}
	for name, sizes := range map[string][]int{
		"100 B":                  {100},
		"1 KiB":                  {1 << 10},
		"16 KiB":                 {16 << 10},
		"100 KiB":                {100 << 10},
		"100 B beside 100 KiB":   {100, 100 << 10},
		"100 B beside 1 MiB":     {100, 100, 100, 1 << 20},
		"1 KiB, 10 KiB, 100 KiB": {1 << 10, 10 << 10, 100 << 10},
		"100 B ahead of 56 KiB":  append(slices.Repeat([]int{100}, 60), 56<<10),
	} {
		for what, keep := range keepers {
			t.Run(fmt.Sprintf("%s of %s", what, name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					total := 0
					for _, size := range sizes {
						total += size + overhead
					}
					// Those of all sizes come together, and it is always the last but one that is kept, just ahead of the largest.
					every := len(sizes) * (4*pinned/total + 1)
					at, window := max(0, len(sizes)-2), min(2500, 8<<20/total)
					if len(sizes) > 1 {
						window = len(sizes)
					}
					n := newBareNSQD(sizes...)
					n.windowed = true
					var all []any
					own, count := 0, 0
					connectBare(t, n, window, HandlerFunc(func(m *Message) error {
						if count++; count%every == at+1 && len(all) < kept {
							all = append(all, keep(m))
							own += len(m.Body) + overhead
						}
						return nil
					}), 1)
					n.send(2*window + every) // tables and buffers of the connection grow
					synctest.Wait()
					clear(all)
					all, own, count = all[:0], 0, 0
					before := heapNow()
					n.send(kept * every)
					synctest.Wait()
					used := heapNow() - before
					require.Len(t, all, kept)
					per := (int(used) - own) / kept
					t.Logf("one of %d kept pins %d bytes beside its own %d", every, per, own/kept)
					require.LessOrEqual(t, per, pinned)
					runtime.KeepAlive(all)
				})
			})
		}
	}
}
