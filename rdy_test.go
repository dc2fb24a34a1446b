package nsq

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rdyBench shows the rules a make-believe wire: what they decide is written at once, unless writes is off.
type rdyBench struct {
	rdyRules
	now    time.Time
	writes bool
	sent   int // RDY commands
	next   time.Time
}

func newRDYBench(maxInFlight int64) *rdyBench {
	return &rdyBench{
		rdyRules: rdyRules{
			maxInFlight: maxInFlight, turnIdle: 500 * time.Millisecond, turnBusy: 2 * time.Second, interval: 5 * time.Second,
		},
		now:    time.Unix(1e9, 0),
		writes: true,
	}
}

func (b *rdyBench) add(maxRDY int64) *rdyConn {
	c := &rdyConn{max: maxRDY}
	b.join(b.now, c)
	return c
}

// addSettled adds n connections and lets the burst pass.
func (b *rdyBench) addSettled(n int) []*rdyConn {
	var added []*rdyConn
	for range n {
		added = append(added, b.add(2500))
	}
	b.settleDown()
	return added
}

// step makes one step and carries it out as rdyLoop would.
func (b *rdyBench) step() []rdyChange {
	changes, next := b.rdyRules.step(b.now)
	b.next = next
	b.sent += len(changes)
	for _, c := range b.conns {
		if c.measured {
			c.measured, c.peak, c.received = false, c.unanswered, 0
		}
		if b.writes {
			c.written, c.taken = c.wanted, c.wanted
		}
	}
	return changes
}

// settleDown steps until nothing changes, ending bursts of joins.
func (b *rdyBench) settleDown() {
	if b.now.Before(b.settled) {
		b.now = b.settled
	}
	for range 1000 {
		if len(b.step()) == 0 {
			return
		}
		b.now = b.now.Add(raiseRetry)
	}
	panic("the rules don't come to rest")
}

// run lets time pass: whenever the rules ask for it they are asked.
func (b *rdyBench) run(d time.Duration) {
	end := b.now.Add(d)
	for {
		b.step()
		if b.next.IsZero() || b.next.After(end) {
			break
		}
		if b.next.Before(b.now) {
			panic("the rules ask for the past")
		}
		b.now = b.next
	}
	b.now = end
	b.step()
}

// message lets c receive one.
func (b *rdyBench) message(c *rdyConn) {
	c.unanswered++
	c.peak = max(c.peak, c.unanswered)
	c.received++
	c.lastMessage = b.now
}

func rdyOf(conns []*rdyConn) []int64 {
	var rdy []int64
	for _, c := range conns {
		rdy = append(rdy, c.wanted)
	}
	return rdy
}

func rdySum(shares []int64) (sum int64) {
	for _, n := range shares {
		sum += n
	}
	return sum
}

func TestFairSharesDivideAll(t *testing.T) {
	for limit := int64(0); limit <= 50; limit++ {
		for n := 0; n <= 20; n++ {
			conns := make([]*rdyConn, n)
			for i := range conns {
				conns[i] = &rdyConn{max: 2500}
			}
			shares := fairShares(limit, conns, func(c *rdyConn) int64 { return c.max })
			if n == 0 {
				require.Empty(t, shares)
				continue
			}
			require.Equal(t, limit, rdySum(shares), "%d over %d", limit, n)
			require.LessOrEqual(t, slices.Max(shares)-slices.Min(shares), int64(1), "%d over %d", limit, n)
			require.True(t, slices.IsSortedFunc(shares, func(a, b int64) int { return int(b - a) }), "the earlier ones get the larger shares")
		}
	}
}

func TestFairSharesRespectCaps(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for limit := int64(0); limit <= 50; limit++ {
		for n := 1; n <= 20; n++ {
			conns := make([]*rdyConn, n)
			var room int64
			for i := range conns {
				conns[i] = &rdyConn{max: random.Int64N(6)}
				room += conns[i].max
			}
			shares := fairShares(limit, conns, func(c *rdyConn) int64 { return c.max })
			require.Equal(t, min(limit, room), rdySum(shares), "%d over %v", limit, shares)
			// Fair: who has less than another one by more than 1 is at its cap.
			for i, s := range shares {
				require.LessOrEqual(t, s, conns[i].max)
				require.GreaterOrEqual(t, s, int64(0))
				require.True(t, s == conns[i].max || s >= slices.Max(shares)-1, "%d over %v", limit, shares)
			}
		}
	}
}

func TestSharesOnEveryNumberOfConnections(t *testing.T) {
	for limit := int64(0); limit <= 50; limit++ {
		for n := 1; n <= 20; n++ {
			b := newRDYBench(limit)
			conns := b.addSettled(n)
			rdy := rdyOf(conns)
			require.Equal(t, limit, rdySum(rdy), "%d over %d", limit, n)
			require.LessOrEqual(t, slices.Max(rdy)-slices.Min(rdy), int64(1), "%d over %d: %v", limit, n, rdy)
		}
	}
}

func TestSharesFollowJoinsAndLeaves(t *testing.T) {
	b := newRDYBench(10)
	first := b.add(2500)
	b.settleDown()
	require.Equal(t, []int64{10}, rdyOf(b.conns))
	b.add(2500)
	require.Equal(t, []rdyChange{{first, 5}}, b.step(), "lowered first")
	require.Equal(t, []int64{5, 0}, []int64{first.written, b.conns[1].written})
	b.step()
	require.Equal(t, []int64{5, 5}, rdyOf(b.conns))
	b.add(2500)
	b.settleDown()
	require.Equal(t, []int64{4, 3, 3}, rdyOf(b.conns))
	b.leave(first)
	b.settleDown()
	require.Equal(t, []int64{5, 5}, rdyOf(b.conns))
}

func TestSharesBeyondACapGoToTheOthers(t *testing.T) {
	b := newRDYBench(20)
	b.add(3)
	b.add(2500)
	b.add(4)
	b.settleDown()
	require.Equal(t, []int64{3, 13, 4}, rdyOf(b.conns))
}

func TestRaisesWaitForTheLoweringToBeWritten(t *testing.T) {
	b := newRDYBench(6)
	first := b.add(2500)
	b.settleDown()
	b.writes = false
	second := b.add(2500)
	require.Equal(t, []rdyChange{{first, 3}}, b.step())
	for range 10 {
		b.now = b.now.Add(time.Hour)
		require.Empty(t, b.step(), "a stuck writer keeps its budget")
	}
	first.written = 3
	require.Equal(t, []rdyChange{{second, 3}}, b.step())
}

func TestRaisesWaitUntilNSQDHasReadTheLowering(t *testing.T) {
	b := newRDYBench(6)
	first := b.add(2500)
	b.settleDown()
	second := b.add(2500)
	require.Equal(t, []rdyChange{{first, 3}}, b.step())
	first.held, first.heldUntil = 6, b.now.Add(30*time.Millisecond)
	require.Empty(t, b.step())
	require.Equal(t, first.heldUntil, b.next, "no event tells of it")
	require.EqualValues(t, 6, first.reserved())

	first.held, first.heldUntil = 0, time.Time{}
	require.Equal(t, []rdyChange{{second, 3}}, b.step())

	b.setMaxInFlight(4)
	require.Equal(t, []rdyChange{{first, 2}, {second, 2}}, b.step())
	first.held, first.heldUntil = 3, b.now.Add(30*time.Millisecond)
	b.setMaxInFlight(6)
	require.Equal(t, []rdyChange{{first, 3}, {second, 3}}, b.step(), "what is held for itself it may have back")
}

// A turn ends in time although its RDY is stuck in the mailbox: nothing but the clock would tell.
func TestATurnEndsThoughItsRDYIsNotWritten(t *testing.T) {
	for name, phase := range map[string]rdyPhase{"turns": rdyNormal, "probe": rdyProbe} {
		t.Run(name, func(t *testing.T) {
			b := newRDYBench(1)
			b.setPhase(phase, 1)
			first, second := b.add(2500), b.add(2500)
			b.writes = false // of the first
			require.Equal(t, []rdyChange{{first, 1}}, b.step())
			require.Equal(t, b.now.Add(b.turnIdle), b.next)
			b.now = b.next
			b.step()
			b.step()
			require.Equal(t, int64(1), second.wanted)
		})
	}
}

func TestTurnsLeaveTimeForTheLowering(t *testing.T) {
	b := newRDYBench(1)
	conns := b.addSettled(4)
	for _, c := range conns {
		c.holdTime = 30 * time.Millisecond
	}
	require.EqualValues(t, 1, conns[0].wanted)
	start := conns[0].turnStart
	b.step()
	require.Equal(t, start.Add(470*time.Millisecond), b.next)
	b.now = b.next
	b.writes = false
	require.Equal(t, []rdyChange{{conns[0], 0}}, b.step())
}

func TestAStuckWriterKeepsItsBudgetUntilItsConnectionHasEnded(t *testing.T) {
	b := newRDYBench(6)
	first := b.add(2500)
	b.settleDown()
	b.writes = false
	second := b.add(2500)
	b.step()
	first.closing = true
	require.Empty(t, b.step())
	b.leave(first)
	require.Equal(t, []rdyChange{{second, 6}}, b.step())
}

func TestARaiseThatIsNotWrittenGivesWayWhenTheBudgetShrinks(t *testing.T) {
	b := newRDYBench(12)
	busy := b.add(2500)
	b.settleDown()
	b.message(busy)
	busy.closing, busy.written, busy.wanted = true, 0, 0
	b.writes = false
	stuck := b.add(2500)
	require.Equal(t, []rdyChange{{stuck, 11}}, b.step())
	b.setMaxInFlight(6)
	require.Equal(t, []rdyChange{{stuck, 5}}, b.step(), "it is a raise for nsqd, so it is paid for")
	busy.unanswered = 0
	require.Equal(t, []rdyChange{{stuck, 6}}, b.step())
}

func TestARaiseBehindALoweringThatIsStuckGivesWayToo(t *testing.T) {
	b := newRDYBench(4)
	conns := b.addSettled(2)
	stuck, other := conns[0], conns[1]
	b.writes = false
	b.setPhase(rdyHold, 1)
	b.step()
	stuck.taken = 0 // RDY 0 is being written
	other.written, other.taken = 0, 0
	b.setPhase(rdyNormal, 2)
	require.Equal(t, []rdyChange{{stuck, 2}, {other, 2}}, b.step())
	other.written, other.taken = 2, 2
	b.message(other)
	b.message(other)
	b.setMaxInFlight(2)
	require.Equal(t, []rdyChange{{stuck, 0}, {other, 1}}, b.step(), "RDY 2 would come when RDY 0 is written")
}

func TestARaiseThatWasTakenBackUnwrittenIsFreeBudget(t *testing.T) {
	b := newRDYBench(1)
	b.writes = false
	stuck := b.add(2500)
	require.Equal(t, []rdyChange{{stuck, 1}}, b.step())
	other := b.add(2500)
	b.step()
	b.now = b.now.Add(b.turnIdle)
	require.Equal(t, []rdyChange{{stuck, 0}}, b.step())
	require.Equal(t, b.now, b.next, "nobody else would tell that the budget is free: RDY 0 is what nsqd has")
	require.Equal(t, []rdyChange{{other, 1}}, b.step())
}

func TestRaisesWaitForUnansweredMessages(t *testing.T) {
	b := newRDYBench(8)
	first := b.add(2500)
	b.settleDown()
	for range 8 {
		b.message(first)
	}
	second := b.add(2500)
	b.settleDown()
	require.Equal(t, []int64{4, 0}, rdyOf(b.conns))
	require.True(t, first.watch, "the rules want to know of its answers")
	first.unanswered--
	b.settleDown()
	require.Equal(t, []int64{4, 1}, rdyOf(b.conns), "nobody starves for the sake of a larger raise")
	first.unanswered = 4
	b.settleDown()
	require.Equal(t, int64(4), second.wanted)
	require.False(t, first.watch)
}

func TestBudgetIsLentToBusyConnectionsAndComesBack(t *testing.T) {
	b := newRDYBench(8)
	conns := b.addSettled(4)
	busy, lender := conns[0], conns[3]
	require.Equal(t, []int64{2, 2, 2, 2}, rdyOf(conns))
	b.message(busy)
	b.message(busy)
	b.run(5 * time.Second)
	b.settleDown()
	require.Equal(t, []int64{5, 1, 1, 1}, rdyOf(conns), "lenders keep 1, or nobody would see them wake")

	for busy.unanswered < 5 {
		b.message(busy)
	}
	b.message(lender) // it uses up its 1
	b.settleDown()
	require.Equal(t, int64(1), lender.wanted, "the borrower's messages are unanswered")
	busy.unanswered = 0
	b.settleDown()
	require.Equal(t, []int64{3, 1, 1, 3}, rdyOf(conns), "both share what the others don't use")

	lender.unanswered = 0
	b.run(11 * time.Second) // two looks without a message
	b.settleDown()
	require.Equal(t, []int64{2, 2, 2, 2}, rdyOf(conns), "nobody is busy any more")
	require.Zero(t, b.next, "and nothing is left to do")
}

func TestBudgetIsNotLentBeyondACap(t *testing.T) {
	b := newRDYBench(12)
	busy := b.add(5)
	b.add(2500)
	b.add(2500)
	b.settleDown()
	require.Equal(t, []int64{4, 4, 4}, rdyOf(b.conns))
	for range 4 {
		b.message(busy)
	}
	b.run(6 * time.Second)
	b.settleDown()
	require.Equal(t, int64(5), busy.wanted)
	require.Equal(t, int64(12), rdySum(rdyOf(b.conns)))
}

func TestEverybodyBusyMeansEvenShares(t *testing.T) {
	b := newRDYBench(9)
	conns := b.addSettled(3)
	for range 10 {
		for _, c := range conns {
			for c.unanswered < c.written {
				b.message(c)
			}
		}
		b.run(5 * time.Second)
		require.Equal(t, []int64{3, 3, 3}, rdyOf(conns))
		for _, c := range conns {
			c.unanswered = 0
		}
	}
}

func TestTurnsGoRoundIdleConnections(t *testing.T) {
	skipUnderRace(t, "rules without goroutines")
	t.Parallel()
	for _, slots := range []int64{1, 2, 3, 7} {
		b := newRDYBench(slots)
		conns := b.addSettled(20)
		limit := time.Duration((20+slots-1)/slots) * 500 * time.Millisecond
		had := map[*rdyConn]time.Time{} // since when not
		for _, c := range conns {
			had[c] = b.now
		}
		b.sent = 0
		start := b.now
		for b.now.Sub(start) < time.Minute {
			b.step()
			for _, c := range conns {
				if c.written > 0 {
					had[c] = b.now
				}
				if b.now.Sub(had[c]) > limit+10*time.Millisecond {
					require.FailNow(t, "a connection waits for too long for its turn", "%d slots", slots)
				}
			}
			b.now = b.now.Add(10 * time.Millisecond)
		}
		require.Less(t, float64(b.sent)/60/float64(slots), 10.0, "RDY commands a second per unit of max-in-flight")
	}
}

func TestTurnsGoRoundBusyConnections(t *testing.T) {
	b := newRDYBench(2)
	conns := b.addSettled(10)
	had := map[*rdyConn]time.Time{}
	for _, c := range conns {
		had[c] = b.now
	}
	start := b.now
	for b.now.Sub(start) < 2*time.Minute {
		b.step()
		for _, c := range conns { // each message is answered after 10 ms
			c.unanswered = 0
			if c.written > 0 {
				had[c] = b.now
				b.message(c)
			}
			if b.now.Sub(had[c]) > 10*time.Second+200*time.Millisecond {
				require.FailNow(t, "a connection waits for too long for its turn")
			}
		}
		b.now = b.now.Add(10 * time.Millisecond)
	}
}

// A look at all connections for each answer would make a message cost more the more nsqds there are.
func TestAnswersWithinATurnAreNotWatched(t *testing.T) {
	b := newRDYBench(1)
	conns := b.addSettled(2)
	holder := conns[0]
	if holder.written == 0 {
		holder = conns[1]
	}
	b.message(holder)
	b.step()
	require.False(t, holder.watch)
	require.False(t, b.next.IsZero())
	b.run(b.next.Sub(b.now)) // the turn would be over, were it not for the message
	require.EqualValues(t, 1, holder.wanted)
	require.True(t, holder.watch, "its answer is the end of the turn")
	holder.unanswered = 0
	b.step()
	require.Zero(t, holder.wanted)
}

func TestATurnEndsOnlyIfSomebodyWaits(t *testing.T) {
	b := newRDYBench(3)
	conns := b.addSettled(3)
	b.sent = 0
	for range 100 {
		b.message(conns[0])
		b.run(time.Second)
		conns[0].unanswered = 0
	}
	require.LessOrEqual(t, b.sent, 4)
}

func TestABurstOfJoinsNeedsFewCommands(t *testing.T) {
	for _, pause := range []time.Duration{0, time.Millisecond, 19 * time.Millisecond} {
		b := newRDYBench(2000)
		for range 500 {
			b.add(2500)
			b.step()
			b.now = b.now.Add(pause)
		}
		b.settleDown()
		require.Equal(t, int64(2000), rdySum(rdyOf(b.conns)))
		// Without a pause at all: 8 joins one by one, then two commands each at most. With one, all is dealt with
		// every joinBurstMax besides.
		looks := int(500*pause/joinBurstMax) + 1
		require.LessOrEqual(t, b.sent, 64+2*500*looks, "pause %s", pause)
	}
}

func TestABurstOfJoinsIsNotWaitedForTooLong(t *testing.T) {
	b := newRDYBench(100)
	for range 1000 { // one per 10 ms, without end
		b.add(2500)
		b.step()
		b.step() // what has been lowered is written
		b.now = b.now.Add(10 * time.Millisecond)
		if b.now.Sub(time.Unix(1e9, 0))%time.Second == 0 {
			require.Equal(t, int64(100), rdySum(rdyOf(b.conns)))
		}
	}
}

func TestPhasesOfBackoff(t *testing.T) {
	b := newRDYBench(8)
	conns := b.addSettled(4)
	b.setPhase(rdyHold, 1)
	b.settleDown()
	require.Equal(t, []int64{0, 0, 0, 0}, rdyOf(conns))
	require.Zero(t, b.next)

	b.message(conns[0]) // was on its way
	b.setPhase(rdyProbe, 1)
	b.settleDown()
	require.Equal(t, []int64{0, 1, 0, 0}, rdyOf(conns), "the probe goes where nothing is unanswered")

	var order []int
	for range 6 { // nobody sends anything
		b.run(500 * time.Millisecond)
		order = append(order, slices.Index(rdyOf(conns), 1))
		require.Equal(t, int64(1), rdySum(rdyOf(conns)))
	}
	require.Equal(t, []int{2, 3, 1, 2, 3, 1}, order, "the probe goes round")

	probed := conns[1]
	b.message(probed)
	b.run(time.Hour)
	require.Equal(t, []int64{0, 1, 0, 0}, rdyOf(conns), "it stays until it is answered")

	b.setPhase(rdyNormal, 1)
	b.settleDown()
	require.Equal(t, int64(8), rdySum(rdyOf(conns)), "the whole budget again")
	require.GreaterOrEqual(t, slices.Min(rdyOf(conns)), int64(1))
}

func TestAProbeWaitsUntilNobodyElseIsOffered(t *testing.T) {
	b := newRDYBench(8)
	conns := b.addSettled(2)
	b.writes = false
	b.setPhase(rdyHold, 1)
	b.step()
	conns[1].written = 0 // the writer of the first one is stuck at RDY 4
	b.setPhase(rdyProbe, 1)
	for range 10 {
		require.Empty(t, b.step())
		b.now = b.now.Add(time.Second)
	}
	conns[0].written = 0
	require.Len(t, b.step(), 1)
}

func TestMaxInFlightOfZeroIsZeroInEveryPhase(t *testing.T) {
	for _, phase := range []rdyPhase{rdyNormal, rdyHold, rdyProbe} {
		b := newRDYBench(8)
		b.addSettled(3)
		b.setPhase(phase, 1)
		b.settleDown()
		b.setMaxInFlight(0)
		b.settleDown()
		require.Equal(t, []int64{0, 0, 0}, rdyOf(b.conns))
		b.addSettled(1)
		require.Equal(t, []int64{0, 0, 0, 0}, rdyOf(b.conns))
		b.setMaxInFlight(-5)
		b.settleDown()
		require.Equal(t, []int64{0, 0, 0, 0}, rdyOf(b.conns))
	}
}

// Whatever the views say, a step never makes the sum of what is reserved larger than the budget, or larger than it was
// before where it was too large already.
func TestStepNeverExceedsTheBudget(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 5))
		b := newRDYBench(random.Int64N(20))
		b.writes = false
		for range 200 {
			b.now = b.now.Add(time.Duration(random.Int64N(int64(time.Second))))
			switch random.IntN(10) {
			case 0:
				if len(b.conns) < 12 {
					b.add(1 + random.Int64N(10))
				}
			case 1:
				if len(b.conns) > 0 {
					b.leave(b.conns[random.IntN(len(b.conns))])
				}
			case 2:
				b.setMaxInFlight(random.Int64N(20))
			case 3:
				b.setPhase(rdyPhase(random.IntN(3)), 1)
			}
			for _, c := range b.conns {
				switch random.IntN(6) {
				case 0:
					c.written, c.taken = c.wanted, c.wanted
				case 1:
					b.message(c)
				case 2:
					c.unanswered = max(0, c.unanswered-random.Int64N(4))
				case 3:
					c.closing = c.closing || random.IntN(20) == 0
				}
				c.peak = max(c.peak, c.unanswered)
			}
			sum := func() (sum int64) {
				for _, c := range b.conns {
					sum += c.reserved()
				}
				return sum
			}
			before := sum()
			changes := b.step()
			holds := func(ok bool, what string) {
				if !ok {
					require.FailNow(t, what, "seed %d, budget %d, changes %v", seed, b.maxInFlight, changes)
				}
			}
			holds(sum() <= max(before, b.maxInFlight), "more than the budget is reserved")
			for _, ch := range changes {
				holds(!ch.conn.closing, "RDY for a closing connection")
				holds(0 <= ch.rdy && ch.rdy <= ch.conn.max, "RDY out of range")
				holds(ch.rdy == ch.conn.wanted, "wanted is not what was decided")
			}
			for _, c := range b.conns {
				holds(b.phase != rdyHold || c.closing || c.wanted == 0, "RDY while backoff waits")
			}
			holds(b.next.IsZero() || !b.next.Before(b.now), "the rules ask for the past")
		}
	}
}
