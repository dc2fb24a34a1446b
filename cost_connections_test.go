package nsq

import (
	"fmt"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What connections cost, beside messages.

var noHandler = HandlerFunc(func(*Message) error { return nil })

// bareNSQDs are any number of bareNSQDs, made as they are dialled.
type bareNSQDs struct {
	dialTime func(i int) time.Duration // of the i-th dial; nil: none

	mu  sync.Mutex // guards all
	all []*bareNSQD
}

func (b *bareNSQDs) dial() net.Conn {
	n := newBareNSQD()
	b.mu.Lock()
	b.all = append(b.all, n)
	i := len(b.all) - 1
	b.mu.Unlock()
	if b.dialTime != nil {
		time.Sleep(b.dialTime(i))
	}
	return n
}

// counts adds up what all of them have counted, and the RDY that they know.
func (b *bareNSQDs) counts() (sum bareCounts, rdy int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range b.all {
		n.mu.Lock()
		sum.writes += n.counts.writes
		sum.reads += n.counts.reads
		sum.rdys += n.counts.rdys
		rdy += n.rdy
		n.mu.Unlock()
	}
	return sum, rdy
}

func bareAddrs(n int) (addrs []string) {
	for i := range n {
		addrs = append(addrs, bareAddr(i))
	}
	return addrs
}

// Connecting many nsqds takes a number of RDY commands that grows with their number, not with its square: shares are
// computed once for those that join together, so that each nsqd is told once, or twice. Telling all of them at each join
// would take 250 commands for each of these 500, and telling all whose share has changed 14.
func TestConnectingManyNSQDsCostsFewRDYs(t *testing.T) {
	skipUnderRace(t, "how many RDY commands are sent")
	const nsqds = 500
	together := func(r *Consumer) error { return r.ConnectToNSQDs(bareAddrs(nsqds)) }
	oneByOne := func(r *Consumer) error {
		for i := range nsqds {
			if err := r.ConnectToNSQD(bareAddr(i)); err != nil {
				return err
			}
		}
		return nil
	}
	for name, test := range map[string]struct {
		connect  func(r *Consumer) error
		dialTime func(i int) time.Duration
	}{
		"together, at the same moment":   {together, nil},
		"together, within 100 ms":        {together, func(i int) time.Duration { return time.Duration(i) * 100 * time.Millisecond / nsqds }},
		"one by one, at the same moment": {oneByOne, nil},
		"one by one, a ms each":          {oneByOne, func(int) time.Duration { return time.Millisecond }},
	} {
		for _, maxInFlight := range []int{2500, 100} { // more than one for each, and too little
			t.Run(fmt.Sprintf("%s, with a max-in-flight of %d", name, maxInFlight), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					all := &bareNSQDs{dialTime: test.dialTime}
					r := newBareConsumer(t, maxInFlight, all.dial, noHandler, 1)
					require.NoError(t, test.connect(r))
					time.Sleep(joinBurstMax) // less than a turn
					synctest.Wait()
					counts, rdy := all.counts()
					require.Equal(t, maxInFlight, rdy, "all of it is handed out")
					t.Logf("%d RDY commands", counts.rdys)
					require.LessOrEqual(t, counts.rdys, 2*nsqds)
				})
			})
		}
	}
}

// An idle connection has two goroutines, and takes 16 KiB with their stacks: twice 4 KiB of stack, 4 KiB of buffer for reading.
// The limit leaves room for another 4 KiB, since the runtime doubles stacks. A buffer of 16 KiB, or a third goroutine, is too much. This is
// the library's share alone: nsqd's end, and the socket where there is one, come on top.
func TestAnIdleConnectionCostsLittle(t *testing.T) {
	if raceDetector {
		t.Skip("measures memory, of which the race detector takes more than the library does: run it without -race")
	}
	synctest.Test(t, func(t *testing.T) {
		const conns = 500
		settleStacks(t)

		// What these nsqds take themselves: they are made, and nobody speaks to them.
		alone := memoryNow()
		idle := make([]*bareNSQD, conns)
		for i := range idle {
			idle[i] = newBareNSQD()
		}
		ofNSQDs := memoryNow().since(alone)
		runtime.KeepAlive(idle)
		idle = nil

		all := &bareNSQDs{all: make([]*bareNSQD, 0, conns+1)}
		r := newBareConsumer(t, 2500, all.dial, noHandler, 1)
		require.NoError(t, r.ConnectToNSQD("the-first:4150")) // what the consumer has once
		synctest.Wait()
		before := memoryNow()
		for _, addr := range bareAddrs(conns) { // one by one, or the goroutines of all those connects would be counted
			require.NoError(t, r.ConnectToNSQD(addr))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		used := memoryNow().since(before)

		t.Logf("an idle connection: %d goroutines, %d bytes of heap, %d of stack; the nsqd itself %d bytes", used.goroutines/conns,
			(used.heap-ofNSQDs.heap)/conns, used.stack/conns, ofNSQDs.heap/conns)
		require.InDelta(t, 2*conns, used.goroutines, conns/10) // some of earlier tests may just have ended
		require.LessOrEqual(t, (used.heap-ofNSQDs.heap+used.stack)/conns, 20<<10)
	})
}

// memoryUse is what is in use by everybody in the process.
type memoryUse struct{ goroutines, heap, stack int }

func (m memoryUse) since(o memoryUse) memoryUse {
	return memoryUse{m.goroutines - o.goroutines, m.heap - o.heap, m.stack - o.stack}
}

// memoryNow is measured after some collections, which an idle process has as well: each one halves stacks that have once been larger.
func memoryNow() memoryUse {
	for range 4 {
		runtime.GC()
	}
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return memoryUse{runtime.NumGoroutine(), int(s.HeapAlloc), int(s.StackInuse)}
}

// settleStacks takes away what other tests have left behind. The runtime gives new goroutines stacks as large as those that it
// saw at the last collection: so let it see many small ones. And it has the remains of goroutines that have ended, which
// these now use up.
func settleStacks(t *testing.T) {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	for range 5000 {
		go func() { <-over }()
	}
	synctest.Wait()
}
