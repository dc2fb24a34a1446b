package e2e

import (
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ledger numbers the messages of a test and keeps book of what becomes of each. All methods may be called from several
// goroutines.
type ledger struct {
	t *testing.T

	mu       sync.Mutex // guards the fields below
	next     int
	sums     map[int]uint32     // of the body, by number
	accepted map[int]bool       // nsqd has confirmed it
	handled  map[int][]handling // by number, in the order in which they began
	finished map[int]bool       // a handler returned nil
	faults   map[string][]fault // by address
}

// handling is one call of the handler.
type handling struct {
	nsqd     string
	attempts uint16
	begun    time.Time
	err      error
	ended    bool
}

// fault is something that was done to an nsqd, or to the link to it, after which messages may be handled again: all that
// nsqd had in flight then, since what it has not read of our answers it never will.
type fault struct {
	at   time.Time
	most int // messages in flight
}

func newLedger(t *testing.T) *ledger {
	return &ledger{
		t:        t,
		sums:     make(map[int]uint32),
		accepted: make(map[int]bool),
		handled:  make(map[int][]handling),
		finished: make(map[int]bool),
		faults:   make(map[string][]fault),
	}
}

// numberLength is how many digits a body starts with.
const numberLength = 8

// number makes bodies out of the next numbers and these payloads.
func (l *ledger) number(payloads [][]byte) (bodies [][]byte, first int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first = l.next
	for _, payload := range payloads {
		body := append(fmt.Appendf(nil, "%0*d", numberLength, l.next), payload...)
		l.sums[l.next] = crc32.ChecksumIEEE(body)
		bodies = append(bodies, body)
		l.next++
	}
	return bodies, first
}

func (l *ledger) accept(first, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := first; i < first+n; i++ {
		l.accepted[i] = true
	}
}

// publishBatch is how many messages are published at a time.
const publishBatch = 100

// publish puts n numbered messages into the topic.
func (l *ledger) publish(to node, n int) {
	l.t.Helper()
	for n > 0 {
		batch := min(n, publishBatch)
		require.NoError(l.t, l.offer(to, make([][]byte, batch)))
		n -= batch
	}
}

// offer publishes a message for each payload. What an error leaves open, whether nsqd has them, stays open in the ledger.
func (l *ledger) offer(to node, payloads [][]byte) error {
	bodies, first := l.number(payloads)
	err := to.MultiPublish(topic, bodies)
	if err == nil {
		l.accept(first, len(bodies))
	}
	return err
}

// stream publishes small batches to all nodes in turn until stop is called, and is not discouraged by errors.
func (l *ledger) stream(pause time.Duration, nodes ...node) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			ticker := time.NewTicker(pause)
			defer ticker.Stop()
			for {
				select {
				case <-ticker.C:
					_ = l.offer(n, make([][]byte, 10))
				case <-done:
					return
				}
			}
		})
	}
	end := sync.OnceFunc(func() {
		close(done)
		wg.Wait()
	})
	l.t.Cleanup(end)
	return end
}

// handler enters each message and has work decide on it; nil is always content.
func (l *ledger) handler(work func(m *nsq.Message, number int) error) nsq.Handler {
	return nsq.HandlerFunc(func(m *nsq.Message) error {
		number, ok := l.begin(m)
		if !ok {
			return nil
		}
		i := l.enter(number, m)
		var err error
		if work != nil {
			err = work(m, number)
		}
		l.leave(number, i, err)
		return err
	})
}

// begin reads the number and checks the body.
func (l *ledger) begin(m *nsq.Message) (number int, ok bool) {
	if !assert.GreaterOrEqual(l.t, len(m.Body), numberLength) {
		return 0, false
	}
	number, err := strconv.Atoi(string(m.Body[:numberLength]))
	if !assert.NoError(l.t, err) {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	sum, known := l.sums[number]
	return number, assert.True(l.t, known, "message %d was never published", number) &&
		assert.Equal(l.t, sum, crc32.ChecksumIEEE(m.Body), "body of message %d", number)
}

func (l *ledger) enter(number int, m *nsq.Message) (index int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handled[number] = append(l.handled[number], handling{nsqd: m.NSQDAddress, attempts: m.Attempts, begun: time.Now()})
	return len(l.handled[number]) - 1
}

func (l *ledger) leave(number, index int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := &l.handled[number][index]
	h.err, h.ended = err, true
	if err == nil {
		l.finished[number] = true
	}
}

// fault notes that something is about to be done to an nsqd that has at most so many messages in flight.
func (l *ledger) fault(addr string, most int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults[addr] = append(l.faults[addr], fault{time.Now(), most})
}

// missing returns the numbers that nsqd has confirmed and no handler has finished.
func (l *ledger) missing() (numbers []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for number := range l.accepted {
		if !l.finished[number] {
			numbers = append(numbers, number)
		}
	}
	slices.Sort(numbers)
	return numbers
}

// done is how many messages have been finished.
func (l *ledger) done() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.finished)
}

// handlings returns a copy of what happened to a message.
func (l *ledger) handlings(number int) []handling {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.handled[number])
}

// awaitAll waits until every message has been finished, and checks that none was handled again without a reason.
func (l *ledger) awaitAll() {
	l.t.Helper()
	eventually(l.t, "every message is handled", func() bool { return len(l.missing()) == 0 })
	l.checkAgain()
}

// awaitMore waits until n more messages have been finished.
func (l *ledger) awaitMore(n int) {
	l.t.Helper()
	from := l.done()
	eventually(l.t, fmt.Sprintf("%d more messages are handled", n), func() bool { return l.done() >= from+n })
}

// checkAgain fails the test if a message was handled again without a reason. Reasons are that the handler failed, and a fault
// at the nsqd, of which each explains as many messages as were in flight.
func (l *ledger) checkAgain() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	again := make(map[string]int)
	for number, hs := range l.handled {
		for i, h := range hs[1:] {
			previous := hs[i]
			if previous.ended && previous.err != nil {
				continue
			}
			require.Equal(l.t, previous.nsqd, h.nsqd, "message %d moved", number)
			faults := l.faults[h.nsqd]
			require.True(l.t, len(faults) > 0 && faults[0].at.Before(h.begun),
				"message %d was handled again (attempt %d, after attempt %d) without a reason", number, h.attempts, previous.attempts)
			again[h.nsqd]++
		}
	}
	for addr, n := range again {
		explained := 0
		for _, f := range l.faults[addr] {
			explained += f.most
		}
		require.LessOrEqual(l.t, n, explained, "messages of %s were handled again, more than its faults explain", addr)
	}
}
