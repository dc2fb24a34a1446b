package nsq

import "time"

// rdyEvent is what rdyLoop is told.
type rdyEvent struct {
	conn *Conn
	kind rdyEventKind

	message *Message // of an answer
	answer  answer
}

type rdyEventKind int

const (
	rdyAnswer rdyEventKind = iota // a message was answered, and that can change RDY
	rdyUp                         // conn is subscribed
	rdyDown                       // conn has ended
)

// tell sends an event to rdyLoop.
func (r *Consumer) tell(e rdyEvent) {
	select {
	case r.events <- e:
	case <-r.rdyDone:
	}
}

// rdyState is what rdyLoop owns.
type rdyState struct {
	rules    rdyRules
	backoff  backoff
	seen     uint64 // the backoff period that everybody knows of
	byConn   map[*Conn]*rdyConn
	turns    logGate // of the warning about turns: an nsqd may come and go
	deadline int64   // the earliest of all messages in flight, by monotonic; 0: none
}

// rdyLoop is the one goroutine that decides on RDY and backoff. It is told what happens, looks at the connections, and
// leaves RDY in their mailboxes. It waits for nobody: not for a socket, a handler or another loop. There is one timer,
// set for whatever is due first.
func (r *Consumer) rdyLoop(concurrency int) {
	defer close(r.rdyDone)
	defer r.log.logf(LogLevelInfo, "rdyLoop exiting")
	if n := r.maxInFlight.Load(); n > 0 && n < int64(concurrency) {
		r.log.logf(LogLevelWarning, "max-in-flight %d keeps %d of %d handlers idle", n, int64(concurrency)-n, concurrency)
	}
	s := &rdyState{
		rules: rdyRules{
			maxInFlight: r.maxInFlight.Load(),
			turnIdle:    r.config.turnIdle(),
			turnBusy:    r.config.turnBusy(),
			interval:    r.config.RDYRedistributeInterval,
		},
		backoff: backoff{strategy: containedStrategy{r.config.backoffStrategy(), r.log}, maxDuration: r.config.MaxBackoffDuration},
		byConn:  make(map[*Conn]*rdyConn),
		turns:   logGate{interval: 10 * time.Minute},
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case e := <-r.events:
			r.handleEvent(s, e)
		case <-r.pokes:
		case <-timer.C:
		case <-r.rdyStop:
			return
		}
		if next := r.decideRDY(s); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(max(time.Until(next), 0))
		}
	}
}

func (r *Consumer) handleEvent(s *rdyState, e rdyEvent) {
	now := time.Now()
	switch e.kind {
	case rdyUp:
		c := &rdyConn{conn: e.conn, max: e.conn.MaxRDY()}
		s.byConn[e.conn] = c
		s.rules.join(now, c)
		if limit := r.maxInFlight.Load(); c.max < limit {
			e.conn.log.logf(LogLevelWarning, "max RDY count %d < consumer max in flight %d, truncation possible", c.max, limit)
		}
		if n := len(s.rules.conns); int64(n) == s.rules.maxInFlight+1 && n > 1 {
			if ok, _ := s.turns.allow(now); ok {
				r.log.logf(LogLevelWarning, "%d nsqds take turns with a max-in-flight of %d", n, s.rules.maxInFlight)
			}
		}
	case rdyDown:
		if c := s.byConn[e.conn]; c != nil {
			s.rules.leave(c)
			delete(s.byConn, e.conn)
		}
	case rdyAnswer:
		if r.backoffStep(s, e, now) {
			// The RDY that an answer causes precedes it: else nsqd would send one more under the old one.
			r.decideRDY(s)
		}
		e.conn.queueAnswer(e.message, e.answer)
	}
}

// backoffStep tells the state machine of an answer. It reports whether that was a step.
func (r *Consumer) backoffStep(s *rdyState, e rdyEvent, now time.Time) bool {
	b := &s.backoff
	before, period := b.level, e.conn.probePeriod(e.message)
	var step bool
	switch {
	case e.answer.finish:
		step = b.succeeded(now, period)
	case e.answer.backoff:
		step = b.failed(now, period)
	default:
		step = b.neutral(now, period)
	}
	if !step {
		return false
	}
	switch {
	case b.active():
		r.log.logf(LogLevelWarning, "backing off for %s (backoff level %d), setting all to RDY 0", b.last, b.level)
	case before > 0:
		r.log.logf(LogLevelWarning, "exiting backoff, returning all to RDY %d", r.perConn(s))
	}
	return true
}

// perConn is an even share, for people.
func (r *Consumer) perConn(s *rdyState) int64 {
	return min(max(s.rules.maxInFlight/max(int64(len(s.rules.conns)), 1), 1), s.rules.maxInFlight)
}

// decideRDY brings the rules up to date and carries out what they decide. It returns when to do so next.
func (r *Consumer) decideRDY(s *rdyState) (next time.Time) {
	now := time.Now()
	// A pause of no length is one too: RDY 0 first, so that what was on its way is not taken for a probe.
	if s.seen == s.backoff.period && s.backoff.tick(now) {
		r.log.logf(LogLevelWarning, "backoff timeout expired, sending RDY 1")
	}
	r.followBackoff(s)
	if n := r.maxInFlight.Load(); n != s.rules.maxInFlight {
		s.rules.setMaxInFlight(n)
	}
	s.look()
	if now := monotonic(); s.deadline != 0 && s.deadline <= now {
		r.expireMessages(s, now)
		s.look()
	}
	changes, due := s.rules.step(now)
	for _, ch := range changes {
		ch.conn.conn.setRDY(ch.rdy, s.probePeriod(ch.rdy))
	}
	if s.follow() {
		r.changed() // by who didn't know yet that it matters
	}
	return earliest(earliest(due, s.backoff.next()), instant(s.deadline))
}

// followBackoff lets the rules and everybody who answers know where backoff stands.
func (r *Consumer) followBackoff(s *rdyState) {
	phase := rdyNormal
	switch {
	case s.backoff.probing():
		phase = rdyProbe
	case s.backoff.active():
		phase = rdyHold
	}
	if phase == s.rules.phase && s.backoff.period == s.seen {
		return
	}
	s.seen = s.backoff.period
	s.rules.setPhase(phase, s.backoff.period)
	if phase == rdyNormal {
		for _, c := range s.rules.conns {
			c.conn.endProbe() // its RDY of 1 may stay as it is
		}
	}
	r.backoffActive.Store(s.backoff.active())
	r.mu.Lock()
	r.backoff = backoffStatus{level: s.backoff.level, waiting: s.backoff.waiting, until: s.backoff.until}
	r.mu.Unlock()
}

// probePeriod is the period in which messages that come under this RDY decide.
func (s *rdyState) probePeriod(rdy int64) uint64 {
	if rdy > 0 && s.backoff.probing() {
		return s.backoff.period
	}
	return 0
}

// look shows the rules what is on the wire.
func (s *rdyState) look() {
	s.deadline = 0
	for _, c := range s.rules.conns {
		var deadline int64
		c.rdyView, deadline = c.conn.view()
		if deadline != 0 && (s.deadline == 0 || deadline < s.deadline) {
			s.deadline = deadline
		}
	}
}

// follow tells the connections what the rules want to be told of. It reports whether one of those has changed since it
// was looked at.
func (s *rdyState) follow() (again bool) {
	for _, c := range s.rules.conns {
		unanswered := c.conn.follow(c.watch, c.target < c.base, c.measured)
		again = again || c.watch && unanswered < c.unanswered
		c.measured = false
	}
	return again
}

// expireMessages drops messages whose timeout has passed: nsqd gives them to somebody else.
func (r *Consumer) expireMessages(s *rdyState, now int64) {
	for _, c := range s.rules.conns {
		if n := c.conn.expire(now); n > 0 {
			if ok, more := r.expiredGate.allow(time.Now()); ok {
				c.conn.log.logf(LogLevelWarning, "the timeout of %s has passed before an answer%s", counted(n, "message"), alsoSuppressed(more))
			}
		}
	}
	r.inbox.purge()
}
