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

// inbox is what handlers take messages from: a queue of what came together. Readers never wait for handlers, and each
// message is there for all handlers until one takes it.
//
// While handlers are busy, taking a message is one atomic addition: a lock or a channel for each would cost more than all
// else that happens to it (BenchmarkInbox).
type inbox struct {
	front atomic.Pointer[arrivals] // what handlers take from; changed under mu

	mu      sync.Mutex // guards the fields below
	arrived sync.Cond  // something is in more, or closed
	more    *arrivals  // behind front, oldest first, linked: so queueing costs no allocation
	last    *arrivals  // of more
	queued  int        // messages in more
	full    int        // how many it may become before more is searched for messages that no handler will get
	idle    int        // handlers that wait
	waking  bool       // one of them was woken and has not come yet
	closed  bool
	nothing arrivals // stands at the front when all is used up, so that no messages are held there that are done
}

// minSearch is how many messages are never searched for dropped ones.
const minSearch = 1024

func newInbox() *inbox {
	q := new(inbox)
	q.arrived.L = &q.mu
	q.front.Store(&q.nothing)
	return q
}

// put adds messages. It never blocks.
func (q *inbox) put(a *arrivals) {
	q.mu.Lock()
	q.appendLocked(a)
	q.queued += len(a.messages)
	if q.queued > max(q.full, minSearch) {
		q.purgeLocked()
	}
	q.wakeLocked(len(a.messages))
	q.mu.Unlock()
}

// wakeLocked wakes a handler if there is something for it to do. Who comes wakes the next: all at once would find nothing
// when handlers are quick, and sleeping and waking costs more than many messages do.
func (q *inbox) wakeLocked(messages int) {
	if messages > 0 && q.idle > 0 && !q.waking {
		q.waking = true
		q.arrived.Signal()
	}
}

// take returns the next message, nil if there is none, and what it came with.
func (q *inbox) take() (*Message, *arrivals) {
	for {
		front := q.front.Load()
		if m := front.take(); m != nil {
			return m, front
		}
		if !q.advance(front) {
			return nil, nil
		}
	}
}

// advance puts the next arrivals to the front, in place of those that are used up. It returns false if there are none.
func (q *inbox) advance(usedUp *arrivals) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.front.Load() != usedUp {
		return true // somebody was quicker
	}
	next := q.more
	if next == nil {
		q.front.Store(&q.nothing)
		return false
	}
	if q.more, next.next = next.next, nil; q.more == nil {
		q.last = nil
	}
	q.queued -= len(next.messages)
	q.front.Store(next)
	return true
}

// wait waits until there are messages to take. It returns false when there will be none.
func (q *inbox) wait() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.leftLocked()
	for left == 0 && !q.closed {
		q.idle++
		q.arrived.Wait()
		q.idle--
		q.waking = false
		left = q.leftLocked()
	}
	q.wakeLocked(left - 1)
	return left > 0
}

// leftLocked is how many messages wait for a handler.
func (q *inbox) leftLocked() int { return q.front.Load().left() + q.queued }

// close lets handlers go that find nothing.
func (q *inbox) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.arrived.Broadcast()
}

// purge forgets messages that no handler will get, if all that came with them are such. The others have lost their bodies
// and go when a handler meets them.
func (q *inbox) purge() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.purgeLocked()
}

func (q *inbox) purgeLocked() {
	a := q.more
	q.more, q.last, q.queued = nil, nil, 0
	for a != nil {
		next := a.next
		a.next = nil
		if !a.dropped() {
			q.appendLocked(a)
			q.queued += len(a.messages)
		}
		a = next
	}
	q.full = 2 * q.queued
}

func (q *inbox) appendLocked(a *arrivals) {
	if q.last == nil {
		q.more = a
	} else {
		q.last.next = a
	}
	q.last = a
}

// worker is one unit of a handler's concurrency.
type worker struct {
	handler Handler
	busy    atomic.Bool // it has a message, or had one and is looking for the next
}

// running returns how many handlers are at work.
func (r *Consumer) running() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.runningLocked()
}

func (r *Consumer) runningLocked() (n int) {
	for _, w := range r.workers {
		if w.busy.Load() {
			n++
		}
	}
	return n
}

// handlerLoop runs a worker. It ends when the consumer has stopped.
func (r *Consumer) handlerLoop(w *worker) {
	ended := false
	defer func() {
		if !ended { // the handler ended this goroutine by runtime.Goexit: another one takes its place
			r.handlers.Go(func() { r.handlerLoop(w) })
		}
	}()
	r.log.logf(LogLevelDebug, "starting Handler")
	for more := true; more; more = r.inbox.wait() {
		for m, a := r.inbox.take(); m != nil; m, a = r.inbox.take() {
			// Ahead of the claim, or a stop that is out of time could overlook a handler that begins. And not without a
			// message, or it would count workers that have just come to look for one.
			if !w.busy.Load() {
				w.busy.Store(true)
			}
			if r.claim(m, a) {
				r.handle(w.handler, m)
			}
		}
		w.busy.Store(false)
	}
	r.log.logf(LogLevelDebug, "stopping Handler")
	ended = true
}

// claim takes a message for a handler. It returns false if it must not be handled: it is dropped, too old, or the
// consumer or its connection is closing.
func (r *Consumer) claim(m *Message, a *arrivals) bool {
	if !m.state.run() {
		return false
	}
	c := a.conn
	if c.IsClosing() {
		// Whoever closes the connection gives back what waits, but this one was taken out from under it.
		c.giveBack(m)
		return false
	}
	// Only a handler moves the deadline, so it is still the one that the message came with.
	if a.deadline != 0 && monotonic() >= a.deadline {
		c.expireTaken(m)
		return false
	}
	return true
}

// handle runs a handler on a message and answers it. The handler counts as running already.
func (r *Consumer) handle(h Handler, m *Message) {
	returned := false
	defer func() {
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
		r.log.logf(lvl, "Handler returned error (%s) for msg %s%s", errGoexit, m.ID[:], more)
	} else {
		r.log.logf(lvl, "Handler panicked (%v) for msg %s%s\n%s", panicked, m.ID[:], more, debug.Stack())
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
		r.log.logf(lvl, "Handler returned error (%s) for msg %s%s", err, m.ID[:], more)
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
				m.ID[:], alsoSuppressed(more))
		}
	}
	if m.Attempts <= limit {
		return false
	}
	unseen := ""
	if !r.failedHere.has(m.ID) {
		unseen = " (it did not fail in this process)"
	}
	lvl, more := gatedLevel(&r.givenUpGate, LogLevelWarning)
	r.log.logf(lvl, "msg %s attempted %d times, giving up%s%s", m.ID[:], m.Attempts, unseen, more)
	r.givenUp.Add(1)
	defer m.Finish() // whatever LogFailedMessage does
	if l, ok := h.(FailedMessageLogger); ok {
		l.LogFailedMessage(m)
	}
	return true
}
