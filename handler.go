package nsq

import (
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Handler handles messages. HandleMessage is called by as many goroutines as the handler was added with, each with one
// message at a time.
//
// Returning nil finishes the message. Returning an error requeues it, with a delay that grows with its attempts, and
// the consumer backs off. Neither happens if the message was answered already or DisableAutoResponse was called. A panic,
// and runtime.Goexit, count as an error: they are logged, and the process lives.
type Handler interface {
	HandleMessage(message *Message) error
}

// HandlerFunc is a function as a Handler.
type HandlerFunc func(message *Message) error

// HandleMessage calls h and returns its error.
func (h HandlerFunc) HandleMessage(m *Message) error { return h(m) }

// FailedMessageLogger may be implemented by a Handler to learn of messages that are given up because they had more
// than Config.MaxAttempts attempts. It is called in place of HandleMessage, by the same goroutines; FIN follows.
type FailedMessageLogger interface {
	LogFailedMessage(message *Message)
}

// inbox is what handlers take messages from: one shared channel, with an overflow behind it that grows. So readers
// never wait for handlers, though nsqd sends RDY more messages each time some time out.
type inbox struct {
	ch       chan *Message
	overflow atomic.Int64 // length of more: handlers look only at this

	mu   sync.Mutex // guards the fields below
	more []*Message // behind ch, oldest first
	full int        // how long more may become before it is searched for messages that no handler will get
}

// inboxSize keeps the usual max-in-flight out of the overflow.
const inboxSize = 1024

func newInbox() *inbox { return &inbox{ch: make(chan *Message, inboxSize)} }

// put adds messages. It never blocks.
func (q *inbox) put(ms []*Message) {
	if q.overflow.Load() == 0 {
		for len(ms) > 0 && q.offer(ms[0]) {
			ms = ms[1:]
		}
		if len(ms) == 0 {
			return
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.more = append(q.more, ms...)
	if len(q.more) > max(q.full, inboxSize) {
		q.purgeLocked()
		q.full = 2 * len(q.more)
	}
	// The length first: a handler that empties the channel right after the refill's last look must see it.
	q.overflow.Store(int64(len(q.more)))
	q.refillLocked()
}

func (q *inbox) offer(m *Message) bool {
	select {
	case q.ch <- m:
		return true
	default:
		return false
	}
}

// take returns the next message, nil when done is closed.
func (q *inbox) take(done <-chan struct{}) *Message {
	var m *Message
	select { // much cheaper than the one with two cases
	case m = <-q.ch:
	default:
		select {
		case m = <-q.ch:
		case <-done:
			return nil
		}
	}
	if q.overflow.Load() > 0 {
		q.mu.Lock()
		q.refillLocked()
		q.mu.Unlock()
	}
	return m
}

// refillLocked moves messages from the overflow to the channel.
func (q *inbox) refillLocked() {
	n := 0
	for n < len(q.more) && q.offer(q.more[n]) {
		n++
	}
	clear(q.more[:n])
	q.more = q.more[n:]
	if len(q.more) == 0 {
		q.more = nil
	}
	q.overflow.Store(int64(len(q.more)))
}

// purge forgets messages that no handler will get. Those in the channel have lost their bodies and go when a handler
// meets them.
func (q *inbox) purge() {
	if q.overflow.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.purgeLocked()
	q.overflow.Store(int64(len(q.more)))
	q.refillLocked()
}

func (q *inbox) purgeLocked() {
	var kept []*Message
	for _, m := range q.more {
		if !m.delivery.state.dropped() {
			kept = append(kept, m)
		}
	}
	q.more = kept
}

// handlerLoop is one unit of a handler's concurrency. It ends when the consumer has stopped.
func (r *Consumer) handlerLoop(h Handler) {
	ended := false
	defer func() {
		if !ended { // the handler ended this goroutine by runtime.Goexit: another one takes its place
			r.handlers.Go(func() { r.handlerLoop(h) })
		}
	}()
	r.log.logf(LogLevelDebug, "starting Handler")
	for m := r.inbox.take(r.handlersDone); m != nil; m = r.inbox.take(r.handlersDone) {
		r.running.Add(1) // ahead of the claim, or a stop that is out of time could overlook a handler that begins
		if r.claim(m) {
			r.handle(h, m)
		} else {
			r.running.Add(-1)
		}
	}
	r.log.logf(LogLevelDebug, "stopping Handler")
	ended = true
}

// claim takes a message for a handler. It returns false if it must not be handled: it is dropped, too old, or the
// consumer or its connection is closing.
func (r *Consumer) claim(m *Message) bool {
	if !m.delivery.state.run() {
		return false
	}
	c := m.delivery.conn
	if c.IsClosing() {
		// Whoever closes the connection gives back what waits, but this one was taken out from under it.
		c.giveBack(m)
		return false
	}
	// Only a handler moves the deadline, so it needs no lock yet.
	if d := m.delivery.deadline; d != 0 && monotonic() >= d {
		c.expireTaken(m)
		return false
	}
	return true
}

// handle runs a handler on a message and answers it. The handler counts as running already.
func (r *Consumer) handle(h Handler, m *Message) {
	returned := false
	defer func() {
		r.running.Add(-1)
		if !returned {
			r.handlerBroke(m, recover())
		}
	}()
	if !r.giveUp(h, m) {
		r.respond(m, h.HandleMessage(m))
	}
	returned = true
}

// handlerBroke answers a message whose handler neither returned nor may be trusted to answer later.
func (r *Consumer) handlerBroke(m *Message, panicked any) {
	lvl, more := gatedLevel(&r.failureGate, LogLevelError)
	if panicked == nil {
		r.log.logf(lvl, "Handler returned error (%s) for msg %s%s", errGoexit, m.delivery.id[:], more)
	} else {
		r.log.logf(lvl, "Handler panicked (%v) for msg %s%s\n%s", panicked, m.delivery.id[:], more, debug.Stack())
	}
	m.Requeue(-1)
}

// gatedLevel is the level to log a failed message with: lvl, but LogLevelDebug for most of them when all of many fail.
// more tells how many that were.
func gatedLevel(gate *sharedGate, lvl LogLevel) (gated LogLevel, more string) {
	ok, n := gate.allow(time.Now())
	if !ok {
		return LogLevelDebug, ""
	}
	return lvl, alsoSuppressed(n)
}

var errGoexit = errors.New("nsq: the handler called runtime.Goexit")

// respond sends the answer that a handler's result stands for.
func (r *Consumer) respond(m *Message, err error) {
	if err != nil {
		lvl, more := gatedLevel(&r.failureGate, LogLevelError)
		r.log.logf(lvl, "Handler returned error (%s) for msg %s%s", err, m.delivery.id[:], more)
	}
	if m.IsAutoResponseDisabled() {
		return
	}
	if err != nil {
		m.Requeue(-1)
		return
	}
	m.Finish()
}

// giveUp finishes a message that had its attempts. The handler runs MaxAttempts times at most; nsqd counts deliveries,
// whether the handler ran or not.
func (r *Consumer) giveUp(h Handler, m *Message) bool {
	limit := r.config.MaxAttempts
	if limit == 0 {
		return false
	}
	if m.Attempts == 0 { // nsqd counts from 1, in 16 bits: more than any limit. But a server of a test may not count at all
		if ok, more := r.wrappedGate.allow(time.Now()); ok {
			r.log.logf(LogLevelWarning, "msg %s has 0 attempts: nsqd's counter has wrapped, and max_attempts can't tell%s",
				m.delivery.id[:], alsoSuppressed(more))
		}
	}
	if m.Attempts <= limit {
		return false
	}
	unseen := ""
	if !r.failedHere.has(m.delivery.id) {
		unseen = " (it did not fail in this process)"
	}
	lvl, more := gatedLevel(&r.givenUpGate, LogLevelWarning)
	r.log.logf(lvl, "msg %s attempted %d times, giving up%s%s", m.delivery.id[:], m.Attempts, unseen, more)
	r.givenUp.Add(1)
	defer m.Finish() // whatever LogFailedMessage does
	if l, ok := h.(FailedMessageLogger); ok {
		l.LogFailedMessage(m)
	}
	return true
}
