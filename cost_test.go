package nsq

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What a message costs, in things that can be counted: the same number comes out however busy the machine is. How long
// things take is a matter for benchmarks.

// The link of these tests needs a millisecond for each write. In a bubble the clock stands still until everybody else has
// come to rest: so when a window of messages comes at once, all that can gather during the first write has gathered when it is
// over, and must go out with the second one. How many calls it takes is thus decided by the protocol and not by the
// scheduler: two writes for each window, or one if all had gathered before the first.

// messageCost is what a number of messages took.
type messageCost struct {
	messages, reads, writes int
	allocations, bytes      uint64
}

func (c messageCost) per(n int) float64 { return float64(n) / float64(c.messages) }

// costOfMessages measures so many messages of 100 bytes, which come by the window of max-in-flight. Buffers have grown before.
func costOfMessages(t *testing.T, maxInFlight, messages int) (c messageCost) {
	synctest.Test(t, func(t *testing.T) {
		n := newBareNSQD(100)
		n.windowed, n.linkTime = true, time.Millisecond
		connectBare(t, n, maxInFlight, noHandler, 4)
		n.send(5 * maxInFlight)
		synctest.Wait()

		var memory [2]runtime.MemStats
		counts := n.countsNow()
		runtime.ReadMemStats(&memory[0])
		n.send(messages)
		runtime.ReadMemStats(&memory[1])
		counts = n.countsNow().since(counts)

		require.Equal(t, messages, counts.fins)
		require.Zero(t, counts.rdys+counts.others)
		c = messageCost{messages, counts.reads, counts.writes, memory[1].Mallocs - memory[0].Mallocs, memory[1].TotalAlloc - memory[0].TotalAlloc}
	})
	return c
}

// Commands are written together: those of a window by two writes, whatever max-in-flight is. The limits are the targets
// of the library; they allow for 50 writes in place of two at 2500, and for five at 100. A write for each FIN would be 1.
func TestMessagesCostFewWrites(t *testing.T) {
	for maxInFlight, limit := range map[int]float64{2500: 0.02, 100: 0.05} {
		t.Run(fmt.Sprintf("max-in-flight %d", maxInFlight), func(t *testing.T) {
			c := costOfMessages(t, maxInFlight, 4*2500)
			t.Logf("%.4f writes per message", c.per(c.writes))
			require.LessOrEqual(t, c.per(c.writes), limit)
		})
	}
}

// Messages are read together: by a buffer that has grown to 64 KiB where so much comes at once, which is 480 of these
// messages. A buffer that stays at 4 KiB takes 0.03 reads.
func TestMessagesCostFewReads(t *testing.T) {
	for maxInFlight, limit := range map[int]float64{2500: 0.01, 100: 0.02} {
		t.Run(fmt.Sprintf("max-in-flight %d", maxInFlight), func(t *testing.T) {
			c := costOfMessages(t, maxInFlight, 4*2500)
			t.Logf("%.4f reads per message", c.per(c.reads))
			require.LessOrEqual(t, c.per(c.reads), limit)
		})
	}
}

// A message costs next to no allocation on its way from the socket to the handler, nor does its FIN on the way back:
// messages and bodies come by the batch, commands are appended to one buffer. A single allocation for each message would be 1.
// A window of 100 comes as two batches, of three allocations each.
func TestMessagesCostFewAllocations(t *testing.T) {
	const limit = 0.1
	for _, maxInFlight := range []int{2500, 100} {
		t.Run(fmt.Sprintf("max-in-flight %d", maxInFlight), func(t *testing.T) {
			c := costOfMessages(t, maxInFlight, 4*2500)
			t.Logf("%.4f allocations and %d bytes per message", c.per(int(c.allocations)), int(c.bytes)/c.messages)
			require.LessOrEqual(t, c.per(int(c.allocations)), limit)
		})
	}
}
