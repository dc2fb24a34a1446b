package nsq

import (
	"context"
	"time"
)

// How long closing waits for nsqd, see shutDown. A connection with nothing unanswered is idle: all of it together stays
// below 100 ms then.
const (
	closeWaitIdle = 50 * time.Millisecond // for CLOSE_WAIT
	closeWaitBusy = 2 * time.Second

	stragglersIdle = 25 * time.Millisecond // without a message after CLOSE_WAIT
	stragglersBusy = 250 * time.Millisecond

	hangUpIdle = 15 * time.Millisecond // for the end of what nsqd sends
	hangUpBusy = time.Second

	recently = time.Second // a connection over which a message came since then may have more on their way

	// streaming is from how many messages after CLS on nsqd counts as busy, though nothing was unanswered: it was in the
	// middle of sending. A straggler has been seen 30ms after CLOSE_WAIT then, on a machine with too much to do.
	streaming = 8
)

// startClose queues CLS. It reports whether it did, which it does once, and whether messages are unanswered.
func (c *Conn) startClose() (first, busy bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closing.Store(true)
	if c.ended || c.clsQueued {
		return false, false
	}
	c.clsQueued = true
	c.clsReceived = c.counts.received
	c.wg.Add(1) // for shutDown: counted before anybody waits, since the connection has not ended
	c.out = appendCommand(c.out, StartClose())
	c.signal()
	return true, c.table.live+c.unwritten > 0
}

// shutDown closes the connection so that nothing is lost, and returns when it has ended. startClose came before.
//
//  1. nsqd answers CLS with CLOSE_WAIT; messages come until then.
//  2. Handlers answer what they have; what none has begun was given back with REQ 0.
//  3. A message or two may follow even CLOSE_WAIT, since nsqd writes them from another goroutine: they are given back
//     too, so keep reading until it has been quiet for a while.
//  4. The writing side is closed and what still comes is read to its end. nsqd closes when it has read all answers;
//     closing a socket with unread input would reset it, and could lose the last FINs.
//
// If ctx ends first, the connection ends at once, and shutDown returns how many messages are left to nsqd's message
// timeout. A peer that does not react is given up after a bounded time.
func (c *Conn) shutDown(ctx context.Context, busy bool) (left int) {
	defer func() {
		c.mu.Lock()
		left = c.table.live + c.unwritten
		c.mu.Unlock()
		c.end(nil)
	}()
	closeWait, stragglers, hangUp := closeWaitIdle, stragglersIdle, hangUpIdle
	if busy {
		closeWait, stragglers, hangUp = closeWaitBusy, stragglersBusy, hangUpBusy
	}
	if !c.waitSettled(ctx) {
		return 0
	}
	seen := c.waitFor(ctx, c.waitSeen, closeWait)
	if !seen && !busy && c.heardSince(time.Now().Add(-recently)) {
		// Nothing was unanswered, and yet it is not idle: nsqd is still writing what it has for us.
		seen = c.waitFor(ctx, c.waitSeen, closeWaitBusy)
	}
	if c.receivedSinceCLS() > streaming {
		stragglers = stragglersBusy
	}
	if seen {
		c.waitQuiet(ctx, stragglers)
	}
	if !c.waitSettled(ctx) || ctx.Err() != nil {
		return 0
	}
	if c.receivedSinceCLS() > 0 {
		hangUp = hangUpBusy // nsqd has answers to read, and breaking off could lose them
	}
	c.hangUp(ctx, hangUp)
	return 0
}

// receivedSinceCLS returns how many messages came after CLS was queued.
func (c *Conn) receivedSinceCLS() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts.received - c.clsReceived
}

// waitSettled waits until nothing is unanswered or unwritten. It returns false if the connection or ctx ended first.
func (c *Conn) waitSettled(ctx context.Context) bool {
	for {
		c.mu.Lock()
		busy := c.table.live > 0 || c.unwritten > 0
		c.mu.Unlock()
		if !busy {
			return true
		}
		select {
		case <-c.settled:
		case <-c.done:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// waitFor waits for ch to close, no longer than d. It returns false if it did not.
func (c *Conn) waitFor(ctx context.Context, ch <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ch:
		return true
	case <-timer.C:
	case <-c.done:
	case <-ctx.Done():
	}
	return false
}

// waitQuiet waits until no message came for d.
func (c *Conn) waitQuiet(ctx context.Context, d time.Duration) {
	quietSince := monotonic()
	for {
		c.mu.Lock()
		last := max(c.lastRead, quietSince)
		c.mu.Unlock()
		left := d - time.Duration(monotonic()-last)
		if left <= 0 || c.waitFor(ctx, nil, left) || ctx.Err() != nil || isClosed(c.done) {
			return
		}
	}
}

// hangUp closes the writing side and waits until nsqd has closed its own, no longer than d.
func (c *Conn) hangUp(ctx context.Context, d time.Duration) {
	c.mu.Lock()
	stuck := c.writing
	c.mu.Unlock()
	if stuck {
		return // a peer that doesn't even take what is being written will not take a goodbye either
	}
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	stop := context.AfterFunc(ctx, c.transport.close) // the goodbye of TLS need not fit into the socket
	defer stop()
	if c.transport.closeWrite() {
		c.waitFor(ctx, c.done, d)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
