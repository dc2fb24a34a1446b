package nsq

import (
	"cmp"
	"slices"
	"time"
)

// ConsumerStats are the sums of a consumer since it was made.
type ConsumerStats struct {
	MessagesReceived uint64 // deliveries
	MessagesFinished uint64 // FIN sent, also for messages that were given up
	MessagesRequeued uint64 // REQ sent
	Connections      int    // at present
}

// Stats returns the sums at this moment. The pointer is to a copy of the caller's own.
func (r *Consumer) Stats() *ConsumerStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := r.pastLocked()
	s := &ConsumerStats{}
	for _, n := range r.nodes {
		if n.conn != nil {
			s.Connections++
			counts.add(n.conn.countsNow())
		}
	}
	s.MessagesReceived, s.MessagesFinished, s.MessagesRequeued = counts.received, counts.finished, counts.requeued
	return s
}

// pastLocked are the counts of connections that are no longer any node's.
func (r *Consumer) pastLocked() connCounts {
	counts := r.past
	for c := range r.leaving {
		counts.add(c.countsNow())
	}
	return counts
}

func (c *Conn) countsNow() connCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

// ConsumerStatus is a snapshot of a consumer, for people who want to know why it does what it does.
type ConsumerStatus struct {
	Topic   string
	Channel string

	MaxInFlight int // as set last; 0: paused by ChangeMaxInFlight
	InFlight    int // messages delivered and not answered, over all connections
	Buffered    int // of these, messages that wait for a handler
	Running     int // handlers at work

	MessagesReceived uint64 // deliveries
	MessagesFinished uint64 // FIN sent
	MessagesRequeued uint64 // REQ sent
	MessagesExpired  uint64 // messages whose timeout passed before they were answered
	MessagesGivenUp  uint64 // messages with more than MaxAttempts attempts
	LateAnswers      uint64 // answers that were not sent, or that nsqd refused, because they came too late

	BackoffLevel   int       // 0: not backing off
	BackoffProbing bool      // one connection has RDY 1 to find out
	BackoffUntil   time.Time // when probing begins; zero if it has, or at level 0

	Stopping bool

	NSQDs       []NSQDStatus       // sorted by address
	NSQLookupds []NSQLookupdStatus // in the order they were added
}

// NSQDStatus is how it stands with one nsqd.
type NSQDStatus struct {
	Address    string
	State      NodeState
	Since      time.Time // of State
	Discovered bool      // listed by an nsqlookupd
	Closing    bool      // CLS was sent

	RDY           int64 // as asked for last
	MaxRDY        int64 // what this nsqd takes at most
	InFlight      int   // messages delivered and not answered
	LastMessage   time.Time
	LastHeartbeat time.Time

	// Of the present connection; the sums over all are in ConsumerStatus.
	MessagesReceived, MessagesFinished, MessagesRequeued, MessagesExpired uint64

	Failures  int       // connects that failed in a row, with the loss that came before them; 0 while connected
	NextTry   time.Time // of NodeWaiting
	LastError error     // of the last connect or connection; nil: none
}

// NSQLookupdStatus is how it stands with one nsqlookupd.
type NSQLookupdStatus struct {
	Address    string    // as configured, without user, password and tokens in the query
	LastAnswer time.Time // the last good one; zero: none yet
	Failures   int       // in a row
	LastError  error     // nil after a good answer
	NSQDs      []string  // as listed by the last good answer
}

// Status returns a snapshot. It is made for people and health checks: it takes each connection's lock for a moment.
func (r *Consumer) Status() ConsumerStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := ConsumerStatus{
		Topic:           r.topic,
		Channel:         r.channel,
		MaxInFlight:     int(r.maxInFlight.Load()),
		Running:         r.runningLocked(),
		MessagesGivenUp: r.givenUp.Load(),
		BackoffLevel:    r.backoff.level,
		BackoffProbing:  r.backoff.level > 0 && !r.backoff.waiting,
		Stopping:        r.stopping,
		NSQDs:           []NSQDStatus{},
		NSQLookupds:     []NSQLookupdStatus{},
	}
	if r.backoff.level > 0 && r.backoff.waiting {
		s.BackoffUntil = r.backoff.until
	}
	counts := r.pastLocked()
	for _, n := range r.nodes {
		row := NSQDStatus{
			Address:    n.addr,
			State:      n.state,
			Since:      n.since,
			Discovered: n.discovered,
			LastError:  n.lastErr,
		}
		if n.state != NodeConnected {
			row.Failures = n.failures
		}
		if n.state == NodeWaiting {
			row.NextTry = n.nextTry
		}
		if n.conn != nil {
			connCounts, queued := n.conn.describe(&row)
			counts.add(connCounts)
			s.InFlight += row.InFlight
			s.Buffered += queued
		}
		s.NSQDs = append(s.NSQDs, row)
	}
	for c := range r.leaving {
		var row NSQDStatus
		_, queued := c.describe(&row)
		s.InFlight += row.InFlight
		s.Buffered += queued
	}
	slices.SortFunc(s.NSQDs, func(a, b NSQDStatus) int { return cmp.Compare(a.Address, b.Address) })
	s.MessagesReceived, s.MessagesFinished, s.MessagesRequeued = counts.received, counts.finished, counts.requeued
	s.MessagesExpired, s.LateAnswers = counts.expired, counts.late+r.suppressed.Load()
	for _, l := range r.lookups.list {
		s.NSQLookupds = append(s.NSQLookupds, NSQLookupdStatus{
			Address:    shownAddress(l.addr),
			LastAnswer: l.lastOK,
			Failures:   l.failures,
			LastError:  l.lastErr,
			NSQDs:      slices.Clone(l.listed),
		})
	}
	return s
}

// describe fills in what the connection knows.
func (c *Conn) describe(row *NSQDStatus) (counts connCounts, queued int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	row.Closing = c.closing.Load()
	row.RDY = c.wantRDY
	row.MaxRDY = c.maxRDY.Load()
	row.InFlight = c.table.live
	row.LastMessage = instant(c.lastRead)
	row.LastHeartbeat = instant(c.lastBeat)
	row.MessagesReceived = c.counts.received
	row.MessagesFinished = c.counts.finished
	row.MessagesRequeued = c.counts.requeued
	row.MessagesExpired = c.counts.expired
	return c.counts, len(c.table.queued())
}

// backoffStatus is what rdyLoop tells of its backoff.
type backoffStatus struct {
	level   int
	waiting bool
	until   time.Time
}
