// Package fleet is a fleet of fake nsqds on loopback TCP, from one to a thousand in one process, to measure what a
// consumer does with many of them. They speak as much of the protocol as a consumer without TLS, compression or AUTH
// needs, and cost little: one goroutine and a small buffer per connection, so that the consumer is what is measured.
//
// What a consumer did is counted here, at the far end, and timed by one clock. A consumer that breaks the protocol, or answers
// a message that it doesn't have, fails the fleet: each wait then returns why.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"
)

// MaxRDY is the max_rdy_count of the nsqds, as of a real one by default.
const MaxRDY = 2500

// Fleet is a number of nsqds, each with an address of its own. Its methods may be called from several goroutines.
type Fleet struct {
	nsqds   []*nsqd
	serving sync.WaitGroup

	mu      sync.Mutex // guards the fields below and those of the nsqds; may be taken with conn.mu held, not the other way round
	changed sync.Cond  // something below did
	closed  bool
	err     error // the first thing that a consumer did wrong
	counts  Counts
	first   time.Time // when the first connection came; zero while there are none
	ready   int       // nsqds that have had an RDY above 0 since they are connected to
	readyAt time.Time // when the last of those did
	visited int       // nsqds that have had an RDY above 0 in this round
	lastRDY time.Time // when the last RDY command came
}

// nsqd is one of a fleet. Fields are guarded by Fleet.mu if nothing else is said.
type nsqd struct {
	fleet    *Fleet
	index    int          // never changes
	listener net.Listener // never changes

	conns   map[*conn]bool
	flowing bool  // there is a message for every RDY
	rdy     int64 // the sum over its connections
	ready   bool
	visited bool
	goal    int64     // the RDY that somebody waits for; 0: nobody does
	reached time.Time // when rdy was there
}

// Counts are what the nsqds of a fleet have seen together.
type Counts struct {
	Connections int // open ones
	Subscribed  int // of these, with a subscription
	Identifies  int
	RDYs        int
	FINs        int
	REQs        int
	TOUCHes     int
	NOPs        int
	Heartbeats  int   // sent
	Messages    int   // sent
	BytesIn     int64 // from consumers
	BytesOut    int64
}

// New starts n nsqds. They run until Close.
func New(n int) (*Fleet, error) {
	f := &Fleet{}
	f.changed.L = &f.mu
	for i := range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, errors.Join(fmt.Errorf("nsqd %d of %d: %w", i+1, n, err), f.Close())
		}
		f.nsqds = append(f.nsqds, &nsqd{fleet: f, index: i, listener: l, conns: make(map[*conn]bool)})
	}
	for _, q := range f.nsqds {
		f.serving.Go(q.accept)
	}
	return f, nil
}

// Close ends all nsqds and waits for their goroutines.
func (f *Fleet) Close() error {
	f.mu.Lock()
	f.closed = true
	var errs []error
	for _, q := range f.nsqds {
		errs = append(errs, q.listener.Close())
		for c := range q.conns {
			errs = append(errs, c.close())
		}
	}
	f.changed.Broadcast()
	f.mu.Unlock()
	f.serving.Wait()
	return errors.Join(errs...)
}

// Addrs returns the nsqds' addresses, each host:port.
func (f *Fleet) Addrs() []string {
	addrs := make([]string, len(f.nsqds))
	for i, q := range f.nsqds {
		addrs[i] = q.listener.Addr().String()
	}
	return addrs
}

// Counts returns what has been seen so far, and the first thing that went wrong.
func (f *Fleet) Counts() (Counts, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts, f.err
}

// Connected waits until there are as many subscriptions as nsqds.
func (f *Fleet) Connected(ctx context.Context) error {
	return f.await(ctx, func() bool { return f.counts.Subscribed >= len(f.nsqds) })
}

// Gone waits until there are no connections.
func (f *Fleet) Gone(ctx context.Context) error {
	return f.await(ctx, func() bool { return f.counts.Connections == 0 })
}

// Ready waits until all nsqds have had an RDY above 0. It returns the time from the first connection to the last of those.
func (f *Fleet) Ready(ctx context.Context) (d time.Duration, err error) {
	err = f.await(ctx, func() bool {
		d = f.readyAt.Sub(f.first)
		return f.ready == len(f.nsqds)
	})
	return d, err
}

// Quiet waits until no RDY command has come for d.
func (f *Fleet) Quiet(ctx context.Context, d time.Duration) error {
	for {
		f.mu.Lock()
		left := time.Until(f.lastRDY.Add(d))
		err := f.err
		f.mu.Unlock()
		if err != nil || left <= 0 {
			return err
		}
		select {
		case <-time.After(left):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Busy has one nsqd send as many messages as RDY allows, from now on, and waits until its RDY is the goal. It returns the time
// from the first message to that.
func (f *Fleet) Busy(ctx context.Context, index int, goal int64) (time.Duration, error) {
	q := f.nsqds[index]
	f.mu.Lock()
	start := time.Now()
	q.goal, q.reached = goal, time.Time{}
	q.checkGoal(start)
	f.mu.Unlock()
	q.begin()
	var took time.Duration
	err := f.await(ctx, func() bool {
		took = q.reached.Sub(start)
		return !q.reached.IsZero()
	})
	return took, err
}

// AllBusy has all nsqds send as many messages as RDY allows, from now on.
func (f *Fleet) AllBusy() {
	for _, q := range f.nsqds {
		q.begin()
	}
}

// Idle ends what Busy or AllBusy began.
func (f *Fleet) Idle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.nsqds {
		q.flowing = false
	}
}

// Round waits until each nsqd has had an RDY above 0 at some time since now. It returns how long that took.
func (f *Fleet) Round(ctx context.Context) (time.Duration, error) {
	f.mu.Lock()
	start := time.Now()
	f.visited = 0
	for _, q := range f.nsqds {
		q.visited = q.rdy > 0
		if q.visited {
			f.visited++
		}
	}
	f.mu.Unlock()
	err := f.await(ctx, func() bool { return f.visited == len(f.nsqds) })
	return time.Since(start), err
}

// await waits until ok, called with the lock held, returns true.
func (f *Fleet) await(ctx context.Context, ok func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.changed.Broadcast()
	})
	defer stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.err == nil && !ok() {
		if f.closed {
			return net.ErrClosed
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w; seen so far: %+v", context.Cause(ctx), f.counts)
		}
		f.changed.Wait()
	}
	return f.err
}

// count changes the counts. It may be called with the lock of a connection held.
func (f *Fleet) count(change func(*Counts)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.counts)
	f.changed.Broadcast()
}

// fail notes what went wrong first.
func (f *Fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil && !f.closed {
		f.err = err
		f.changed.Broadcast()
	}
}

// accept serves whoever connects to the nsqd.
func (q *nsqd) accept() {
	f := q.fleet
	for {
		nc, err := q.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			f.fail(fmt.Errorf("nsqd %d: %w", q.index, err))
			return
		}
		c := newConn(q, nc)
		f.mu.Lock()
		if f.closed {
			f.mu.Unlock()
			_ = nc.Close()
			return
		}
		if f.first.IsZero() {
			f.first = time.Now()
		}
		q.conns[c] = true
		f.counts.Connections++
		f.mu.Unlock()
		f.serving.Go(func() {
			err := c.serve()
			c.end()
			if err != nil {
				f.fail(fmt.Errorf("nsqd %d: %w", q.index, err))
			}
		})
	}
}

// gone forgets a connection, with the RDY that it had.
func (q *nsqd) gone(c *conn, rdy int64) {
	f := q.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(q.conns, c)
	q.rdy -= rdy
	f.counts.Connections--
	if c.subscribed {
		f.counts.Subscribed--
	}
	if q.ready && len(q.conns) == 0 {
		q.ready = false
		f.ready--
	}
	if f.counts.Connections == 0 {
		f.first = time.Time{}
	}
	f.changed.Broadcast()
}

// rdyChanged notes the RDY of one of the nsqd's connections.
func (q *nsqd) rdyChanged(change int64) {
	f := q.fleet
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.RDYs++
	f.lastRDY = now
	q.rdy += change
	if q.rdy > 0 && !q.ready {
		q.ready = true
		f.ready++
		f.readyAt = now
	}
	if q.rdy > 0 && !q.visited {
		q.visited = true
		f.visited++
	}
	q.checkGoal(now)
	f.changed.Broadcast()
}

// begin begins to send messages.
func (q *nsqd) begin() {
	f := q.fleet
	f.mu.Lock()
	q.flowing = true
	conns := slices.Collect(maps.Keys(q.conns))
	f.mu.Unlock()
	for _, c := range conns {
		c.send()
	}
}

func (q *nsqd) checkGoal(now time.Time) {
	if q.goal > 0 && q.rdy >= q.goal && q.reached.IsZero() {
		q.reached = now
	}
}
