package nsq

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// rdyRules say which RDY each connection of a consumer gets. They are a value without goroutine, clock or lock:
// rdyLoop, their one user, shows them what is on the wire and the time, and carries out what they decide.
//
// RDY is a ceiling: nsqd sends while fewer messages than RDY are unanswered. A connection therefore reserves the larger
// of its RDY and its unanswered messages, and the reserved amounts of all connections together never exceed
// max-in-flight: a raise waits until the lowering that pays for it is written, nsqd must have read it (nothing tells; a
// round trip or two have passed), and the messages beyond it are answered.
//
// There are two ways to hand out the budget. With at least one for each connection everybody has a share, and what some
// don't use is lent to those who use theirs up. With more connections than budget they take turns with RDY 1.
type rdyRules struct {
	maxInFlight int64
	phase       rdyPhase
	period      uint64 // of backoff

	turnIdle time.Duration // how long a connection that sends nothing keeps its turn
	turnBusy time.Duration // how long one that sends keeps it while others wait
	interval time.Duration // how often demand is looked at

	conns []*rdyConn // in the order of joining

	turns      uint64    // turns ended so far, for the order of the next ones
	nextDemand time.Time // when demand is looked at next; zero: nothing was going on at the last look
	settled    time.Time // a burst of joining connections is dealt with at this time, all at once
	burst      time.Time // when that burst began
	lastJoin   time.Time
}

// rdyPhase is what backoff demands.
type rdyPhase int

const (
	rdyNormal rdyPhase = iota // the whole budget
	rdyHold                   // RDY 0 everywhere
	rdyProbe                  // RDY 1 on one connection
)

// rdyConn is what the rules know of one connection.
type rdyConn struct {
	conn *Conn // for rdyLoop; the rules never look into it
	max  int64 // the max_rdy_count of this nsqd

	rdyView // as rdyLoop saw it just now

	target int64 // the RDY it should have
	base   int64 // its share if nobody lent or borrowed
	need   int64 // by the last look at demand

	raised    time.Time // when a raise was last released
	turnStart time.Time // taking turns: since when it has RDY 1; zero: not yet
	turnEnd   uint64    // its place in the queue for turns
	watch     bool      // the rules want to look again when a message of this one is answered
	measured  bool      // this step looked at demand: peak and received begin anew
}

// rdyView is what a connection tells the rules: all of it counted at the wire, not at the handlers.
type rdyView struct {
	closing     bool      // CLS is queued: RDY has no meaning any more
	written     int64     // RDY as last written, or just being written
	taken       int64     // RDY that nsqd will know once the write that is going on is over
	wanted      int64     // RDY as last asked for
	unanswered  int64     // messages delivered, no answer written
	peak        int64     // most unanswered messages since the last look at demand
	received    int64     // messages since the last look at demand
	probe       uint64    // the backoff period whose probe is unanswered; 0: none
	lastMessage time.Time // zero: none yet
	held        int64     // RDY before a lowering that nsqd may not have read yet; 0: none
	heldUntil   time.Time // when it must have
	holdTime    time.Duration
}

func (c *rdyConn) reserved() int64 { return max(c.written, c.wanted, c.unanswered, c.held) }

// rdyChange is a decision: conn shall get this RDY.
type rdyChange struct {
	conn *rdyConn
	rdy  int64
}

const (
	// joinBurst and joinPause keep the number of RDY commands linear when many connections join one after the other:
	// from the eighth on, shares are computed when nobody has joined for joinPause, joinBurstMax at the latest.
	joinBurst    = 8
	joinPause    = 20 * time.Millisecond
	joinBurstMax = 250 * time.Millisecond

	// raiseRetry is when small raises are released that were held back to have fewer of them.
	raiseRetry = 100 * time.Millisecond
)

// join adds a connection.
func (r *rdyRules) join(now time.Time, c *rdyConn) {
	r.conns = append(r.conns, c)
	if len(r.conns) > joinBurst && now.Sub(r.lastJoin) < joinPause {
		if r.burst.IsZero() {
			r.burst = now
		}
		r.settled = now.Add(min(joinPause, r.burst.Add(joinBurstMax).Sub(now)))
	}
	r.lastJoin = now
}

// leave removes a connection: it reserves nothing any more.
func (r *rdyRules) leave(c *rdyConn) {
	r.conns = slices.DeleteFunc(r.conns, func(o *rdyConn) bool { return o == c })
	r.settle()
}

// setMaxInFlight changes the budget.
func (r *rdyRules) setMaxInFlight(n int64) {
	r.maxInFlight = max(n, 0)
	r.settle()
}

// setPhase follows backoff.
func (r *rdyRules) setPhase(p rdyPhase, period uint64) {
	r.phase, r.period = p, period
	r.settle()
}

// settle ends the patience with a burst of joining connections.
func (r *rdyRules) settle() { r.settled, r.burst = time.Time{}, time.Time{} }

// step decides, from what the connections' views say. It returns the changes to make, in order, and when it wants to
// be asked again if nothing happens before (zero: not at all).
func (r *rdyRules) step(now time.Time) (changes []rdyChange, next time.Time) {
	if now.Before(r.settled) {
		return nil, r.settled
	}
	r.settle()
	live := make([]*rdyConn, 0, len(r.conns))
	for _, c := range r.conns {
		c.watch = false
		if c.closing {
			c.target = 0
			continue
		}
		live = append(live, c)
	}
	r.measure(now, live)
	slots := len(live)
	switch {
	case r.phase == rdyHold || r.maxInFlight == 0:
		for _, c := range live {
			c.target, c.turnStart = 0, time.Time{}
		}
	case r.phase == rdyProbe:
		slots = 1
		r.takeTurns(now, live, slots)
	case int64(len(live)) > r.maxInFlight:
		slots = int(r.maxInFlight)
		r.takeTurns(now, live, slots)
	default:
		r.share(live)
	}
	changes, retry := r.release(now, live)
	if len(live) > slots { // also of turns that begin with this step: a stuck writer would not tell of them
		for _, c := range live {
			if c.target > 0 {
				next = earliest(next, c.turnEnds(now, r))
			}
		}
	}
	return changes, earliest(earliest(next, retry), r.nextDemand)
}

// measure looks at demand: once per interval, as long as messages come or are unanswered. The last look finds nobody
// in need.
func (r *rdyRules) measure(now time.Time, live []*rdyConn) {
	due := !r.nextDemand.IsZero() && !now.Before(r.nextDemand)
	active := false
	for _, c := range live {
		active = active || c.received > 0 || c.peak > 0
		switch used := c.written > 0 && c.peak >= c.written; {
		case due && used:
			c.need = math.MaxInt64
		case due:
			// Twice what it used: room to grow without a wait for the next look.
			c.need = max(1, 2*c.peak)
		case c.target < c.base && used:
			// A lender woke: it gets its share back now. At most once per interval, since lending starts at a look.
			c.need = math.MaxInt64
		}
		c.measured = due
	}
	switch {
	case due && !active:
		r.nextDemand = time.Time{}
	case due || active && r.nextDemand.IsZero():
		r.nextDemand = now.Add(r.interval)
	}
}

// share gives everybody a share, and what some don't need to those who need more.
func (r *rdyRules) share(live []*rdyConn) {
	for i, n := range fairShares(r.maxInFlight, live, func(c *rdyConn) int64 { return c.max }) {
		live[i].base, live[i].target, live[i].turnStart = n, n, time.Time{}
	}
	var spare, claimed int64
	for _, c := range live {
		spare += c.spare()
		claimed += c.claim()
	}
	lent := min(spare, claimed)
	if lent == 0 {
		return
	}
	for i, n := range fairShares(lent, live, (*rdyConn).claim) {
		live[i].target += n
	}
	for i, n := range fairShares(lent, live, (*rdyConn).spare) {
		live[i].target -= n
	}
}

// spare is what c can lend: it keeps what it needs, and 1 in any case, or nobody would see it wake.
func (c *rdyConn) spare() int64 {
	if c.need == 0 { // not measured yet
		return 0
	}
	return max(0, c.base-c.need)
}

// claim is what c could use beyond its share.
func (c *rdyConn) claim() int64 { return max(0, min(c.need, c.max)-c.base) }

// fairShares divides n so that the shares differ by at most one, but for those whose limit is lower: what they can't
// take goes to the others. The earlier ones get the larger shares.
func fairShares(n int64, conns []*rdyConn, limit func(*rdyConn) int64) []int64 {
	order := make([]int, len(conns))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(limit(conns[a]), limit(conns[b])) })
	shares := make([]int64, len(conns))
	for k, i := range order {
		left := int64(len(order) - k)
		shares[i] = min(limit(conns[i]), n/left+min(n%left, 1)) // rounded up, without an overflow
		n -= shares[i]
	}
	return shares
}

// takeTurns has RDY 1 go round: as many connections as there are slots have it at a time. A turn ends after turnIdle
// without a message, or after turnBusy, if somebody waits.
func (r *rdyRules) takeTurns(now time.Time, live []*rdyConn, slots int) {
	var holders, waiting []*rdyConn
	for _, c := range live {
		c.base = 0
		if c.turnStart.IsZero() && min(c.target, c.wanted) > 0 {
			c.turnStart = now // had it as a share until now
		}
		if c.target > 0 {
			holders = append(holders, c)
		} else {
			waiting = append(waiting, c)
		}
	}
	// Those who have had theirs longest give way first when there are too many, as after a change of max-in-flight.
	slices.SortStableFunc(holders, func(a, b *rdyConn) int { return b.turnStart.Compare(a.turnStart) })
	kept := holders[:0]
	for _, c := range holders {
		end := c.turnEnds(now, r)
		if len(kept) == slots || len(live) > slots && !end.IsZero() && !end.After(now) {
			r.turns++
			c.target, c.turnStart, c.turnEnd = 0, time.Time{}, r.turns
			waiting = append(waiting, c)
			continue
		}
		c.target = 1
		kept = append(kept, c)
	}
	slices.SortStableFunc(waiting, func(a, b *rdyConn) int {
		if r.phase == rdyProbe { // one with unanswered messages would not get the probe before their answers
			if d := cmp.Compare(min(a.unanswered, 1), min(b.unanswered, 1)); d != 0 {
				return d
			}
		}
		return cmp.Compare(a.turnEnd, b.turnEnd)
	})
	for _, c := range waiting[:min(len(waiting), slots-len(kept))] {
		c.target = 1
	}
}

// turnEnds returns when the turn of c ends, as things are now; zero if that takes an event first.
func (c *rdyConn) turnEnds(now time.Time, r *rdyRules) time.Time {
	idleEnd := c.lastMessage.Add(c.turn(r.turnIdle))
	switch {
	case c.turnStart.IsZero(): // the raise waits for budget
		return time.Time{}
	case c.lastMessage.Before(c.turnStart): // nothing came in this turn
		return c.turnStart.Add(c.turn(r.turnIdle))
	case c.unanswered == 0 || now.Before(idleEnd): // or each answer would have all connections looked at
		return earliest(idleEnd, c.busyEnd(r))
	}
	c.watch = true // with its answer, the connection is idle since lastMessage
	return c.busyEnd(r)
}

// busyEnd is when c has to give way although it has messages. A probe stays until it is answered.
func (c *rdyConn) busyEnd(r *rdyRules) time.Time {
	if r.phase == rdyProbe {
		return time.Time{}
	}
	return c.turnStart.Add(c.turn(r.turnBusy))
}

// turn leaves time for nsqd to read that the turn is over.
func (c *rdyConn) turn(d time.Duration) time.Duration { return d - min(c.holdTime, d/2) }

// release turns targets into changes that keep the sum of what is reserved within the budget: lowerings at once, raises
// as far as the budget is free. It returns when to try again, if not at an event.
func (r *rdyRules) release(now time.Time, live []*rdyConn) (changes []rdyChange, retry time.Time) {
	free := r.maxInFlight
	var held time.Time // when the first of them is free
	for _, c := range r.conns {
		free -= c.reserved()
		held = earliest(held, c.heldUntil)
		// When they are answered there will be more to hand out.
		c.watch = c.watch || c.unanswered > max(c.written, c.wanted)
	}
	var raises []*rdyConn
	over := -free
	for _, c := range live {
		rdy := min(c.target, c.wanted)
		if unwritten := c.wanted - c.taken; over > 0 && unwritten > 0 {
			// A raise that waits behind a stuck write: nsqd doesn't know of it, so it gives way to what others have.
			rdy = min(rdy, c.wanted-min(over, unwritten))
			over -= c.wanted - rdy
		}
		if rdy < c.wanted {
			if c.wanted > c.written {
				retry = now // perhaps nothing will be written that tells of this; but the next look will show it
			}
			changes = append(changes, rdyChange{c, rdy})
			c.wanted = rdy
		}
		if c.target > c.wanted {
			raises = append(raises, c)
		}
	}
	// Those with nothing first: nobody starves for another one's larger share. Of these, whose turn is due for longest.
	slices.SortStableFunc(raises, func(a, b *rdyConn) int {
		return cmp.Or(cmp.Compare(a.wanted, b.wanted), cmp.Compare(a.turnEnd, b.turnEnd))
	})
	for _, c := range raises {
		if free < 0 || r.phase == rdyProbe && r.otherProbe(c) {
			retry = earliest(retry, held)
			continue
		}
		before := c.reserved()
		rdy := min(c.target, before+free)
		if rdy < c.target {
			retry = earliest(retry, held)
		}
		if rdy <= c.wanted {
			continue
		}
		// Budget that comes back one message at a time shall not cost one RDY for each of them.
		small := rdy < c.target && rdy-c.wanted < (c.target-c.wanted+3)/4
		if small && c.wanted > 0 && now.Sub(c.raised) < raiseRetry {
			retry = earliest(retry, c.raised.Add(raiseRetry))
			continue
		}
		c.wanted = rdy
		c.raised = now
		if c.turnStart.IsZero() {
			c.turnStart = now
		}
		free -= c.reserved() - before
		changes = append(changes, rdyChange{c, rdy})
	}
	return changes, retry
}

// otherProbe tells what keeps c from probing: messages may come by a RDY that nsqd still knows, be it on c itself, or
// there is a probe already, be it unanswered on a connection whose RDY was lowered.
func (r *rdyRules) otherProbe(c *rdyConn) bool {
	found := false
	for _, o := range r.conns {
		unanswered := o.probe != 0 && o.probe == r.period
		o.watch = o.watch || unanswered
		found = found || unanswered || o.written > 0 || o.held > 0 || o != c && o.wanted > 0
	}
	return found
}

// earliest returns the earlier of two times, where zero means never.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
