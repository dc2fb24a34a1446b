package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime/metrics"
	"strconv"
	"sync/atomic"
	"time"
)

// unknown stands for a figure that this system doesn't tell.
const unknown = -1

// usage is what this process has used since it began.
type usage struct {
	at      time.Time
	cpu     time.Duration // user and system; may be unknown
	reads   int64         // system calls, of whatever is read; may be unknown
	writes  int64
	mallocs int64
	gc      float64 // CPU seconds of the garbage collector, as of its last cycle
	busy    float64 // CPU seconds of all, as of then
}

// spent is what a process used between two moments.
type spent struct {
	Wall    time.Duration
	CPU     time.Duration // may be unknown
	Reads   int64         // may be unknown
	Writes  int64         // may be unknown
	Mallocs int64
	GCShare float64 // of the CPU time used, from 0 to 1; 0 if there was no cycle
}

func readUsage() usage {
	samples := []metrics.Sample{
		{Name: "/gc/heap/allocs:objects"},
		{Name: "/gc/heap/tiny/allocs:objects"}, // not among the former
		{Name: "/cpu/classes/gc/total:cpu-seconds"},
		{Name: "/cpu/classes/total:cpu-seconds"},
		{Name: "/cpu/classes/idle:cpu-seconds"},
	}
	metrics.Read(samples)
	u := usage{
		mallocs: int64(samples[0].Value.Uint64() + samples[1].Value.Uint64()),
		gc:      samples[2].Value.Float64(),
		busy:    samples[3].Value.Float64() - samples[4].Value.Float64(),
		at:      time.Now(),
		cpu:     processCPU(),
	}
	u.reads, u.writes = readsAndWrites()
	return u
}

// since returns what was used from before to u.
func (u usage) since(before usage) spent {
	s := spent{
		Wall:    u.at.Sub(before.at),
		CPU:     unknown,
		Reads:   unknown,
		Writes:  unknown,
		Mallocs: u.mallocs - before.mallocs,
	}
	if u.cpu != unknown {
		s.CPU = u.cpu - before.cpu
	}
	if u.reads != unknown {
		s.Reads, s.Writes = u.reads-before.reads, u.writes-before.writes
	}
	if busy := u.busy - before.busy; busy > 0 {
		s.GCShare = (u.gc - before.gc) / busy
	}
	return s
}

// readsAndWrites counts the system calls of this process, failed ones and those that the runtime makes for itself included. go-nsq has no
// place for a counter of its own below its buffers, so both libraries are counted from outside.
func readsAndWrites() (reads, writes int64) {
	data, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return unknown, unknown
	}
	reads, err1 := procField(data, "syscr: ")
	writes, err2 := procField(data, "syscw: ")
	if err1 != nil || err2 != nil {
		return unknown, unknown
	}
	return reads, writes
}

func procField(data []byte, name string) (int64, error) {
	for line := range bytes.Lines(data) {
		if value, ok := bytes.CutPrefix(line, []byte(name)); ok {
			return strconv.ParseInt(string(bytes.TrimSpace(value)), 10, 64)
		}
	}
	return 0, fmt.Errorf("no %q", name)
}

// meter measures what it takes from one message to another.
type meter struct {
	first, last int64 // messages, counted from 1
	all         int64 // may be more than last: until then it is not done
	handled     atomic.Int64
	start, end  usage
	open        atomic.Int32  // which of the three messages are still to come, or being looked at
	done        chan struct{} // closed when none is
	onStart     func()        // may be nil
}

// stallTimeout is how long no message may come until something must be wrong.
const stallTimeout = 10 * time.Second

// newMeter measures count messages after those that warm up, of which there must be one.
func newMeter(warmUp, count int) *meter {
	last := int64(warmUp + count)
	m := &meter{first: int64(warmUp), last: last, all: last, done: make(chan struct{})}
	m.open.Store(3)
	return m
}

// one counts a message. Any goroutine may call it; it costs an atomic addition.
func (m *meter) one() {
	n := m.handled.Add(1)
	if n == m.first || n == m.last || n == m.all {
		m.look(n)
	}
}

func (m *meter) look(n int64) {
	if n == m.first {
		if m.onStart != nil {
			m.onStart()
		}
		m.start = readUsage()
		m.seen()
	}
	if n == m.last {
		m.end = readUsage()
		m.seen()
	}
	if n == m.all {
		m.seen()
	}
}

// seen ends the measuring after all three: other goroutines may be quicker with theirs.
func (m *meter) seen() {
	if m.open.Add(-1) == 0 {
		close(m.done)
	}
}

// wait waits for the last message. It fails if none comes any more.
func (m *meter) wait(ctx context.Context) error {
	before := int64(0)
	tick := time.NewTicker(stallTimeout)
	defer tick.Stop()
	for {
		select {
		case <-m.done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			n := m.handled.Load()
			if n == before {
				return fmt.Errorf("%d of %d messages came, and none for %s", n, m.all, stallTimeout)
			}
			before = n
		}
	}
}
