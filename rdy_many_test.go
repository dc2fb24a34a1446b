package nsq

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// RDY has one owner: whoever changes max-in-flight meanwhile, what is offered stays within it.
func TestManyGoroutinesChangeMaxInFlight(t *testing.T) {
	const most = 8
	inRDYBubble(t, 4, most, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(finishing(time.Millisecond), most)
		g.connect()
		for _, n := range g.nodes {
			n.flood(3 * time.Millisecond)
		}
		var calls sync.WaitGroup
		for i := range uint64(8) {
			calls.Go(func() {
				random := rand.New(rand.NewPCG(9, i))
				for range 100 {
					g.r.ChangeMaxInFlight(random.IntN(most + 1))
					time.Sleep(time.Duration(random.IntN(10)) * time.Millisecond)
				}
			})
		}
		calls.Go(func() {
			random := rand.New(rand.NewPCG(9, 9))
			for range 50 {
				n := g.nodes[random.IntN(4)]
				switch random.IntN(3) {
				case 0:
					n.dropAll()
				case 1:
					_ = g.r.DisconnectFromNSQD(n.addr)
				case 2:
					_ = g.r.ConnectToNSQD(n.addr)
				}
				time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
			}
		})
		over := make(chan struct{})
		go func() { calls.Wait(); close(over) }()
		for !isClosed(over) {
			time.Sleep(time.Millisecond + 7*time.Microsecond)
			synctest.Wait() // what was written has been read
			sum := int64(0)
			for _, n := range g.nodes {
				sum += n.stats().RDY
			}
			require.LessOrEqual(t, sum, int64(most))
		}
		for _, n := range g.nodes {
			n.stopFlood()
			_ = g.r.ConnectToNSQD(n.addr)
		}
		g.r.ChangeMaxInFlight(most)
		time.Sleep(time.Minute)
		require.Equal(t, []int64{2, 2, 2, 2}, g.rdy(), "the last word counts")
	})
}

// nsqds that are down cost the others no RDY commands: the budget moves once, and moves back once.
func TestDownNSQDsCostNoRDY(t *testing.T) {
	inRDYBubble(t, 5, 60, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(finishing(0))
		g.connect()
		g.nodes[3].down()
		g.nodes[4].down()
		time.Sleep(10 * time.Second)
		require.Equal(t, []int64{20, 20, 20, -1, -1}, g.rdy())
		before := len(g.rdyCommands())
		for range 100 {
			g.nodes[0].publish("x")
			time.Sleep(6 * time.Second)
		}
		require.Greater(t, len(g.nodes[3].dialTimes()), 8, "it is tried again and again")
		require.Len(t, g.rdyCommands(), before)
		g.nodes[3].up()
		g.nodes[3].waitSubscribed()
		g.settle()
		require.Equal(t, []int64{15, 15, 15, 15, -1}, g.rdy())
		require.LessOrEqual(t, len(g.rdyCommands())-before, 4)
		requireNoRepeatedRDY(t, g.fakeCluster)
	})
}

// An idle node that wakes at the very moment at which its budget is taken away, again and again: no complaint of
// anybody, and never more in flight than one message for each lowering that was on its way.
func TestNodesThatWakeWhileTheyLend(t *testing.T) {
	inRDYBubble(t, 3, 12, func(cfg *Config) { cfg.RDYRedistributeInterval = time.Second }, func(t *testing.T, g *rdyRig) {
		var log syncedLines
		g.r.AddConcurrentHandlers(finishing(40*time.Millisecond), 12)
		g.connect()
		g.r.SetLogger(&log, LogLevelWarning)
		waking := g.nodes[1]
		g.setChecker(func(e fakeEntry) {
			if e.Kind == entryCommand && e.name() == "RDY" && e.NSQD == waking.addr {
				go waking.publishN(6) // the log's lock is held
			}
		})
		g.nodes[0].flood(0)
		time.Sleep(6 * time.Second)
		g.setChecker(nil)
		g.nodes[0].stopFlood()
		time.Sleep(time.Second)
		synctest.Wait()
		require.Empty(t, log.text())
		require.Equal(t, waking.stats().Published, waking.stats().Finished)
		require.Greater(t, waking.stats().Published, 20)
		_, most := g.unanswered()
		require.LessOrEqual(t, most, 12+4)
		require.Equal(t, int64(12), rdySum(g.rdy()))
	})
}

// A connection whose messages take longer than a look at demand uses its share all the same: nothing of it is lent.
func TestSlowMessagesAreDemand(t *testing.T) {
	t.Parallel()
	inRDYBubble(t, 2, 8, func(cfg *Config) { cfg.RDYRedistributeInterval = 2 * time.Second }, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
			if m.NSQDAddress == g.nodes[0].addr {
				return g.hold(m)
			}
			time.Sleep(20 * time.Millisecond)
			return nil
		}), 8)
		g.connect()
		g.nodes[0].publishN(4)
		g.nodes[1].flood(0)
		for range 10 {
			time.Sleep(2 * time.Second)
			require.Equal(t, []int64{4, 4}, g.rdy())
		}
		g.nodes[1].stopFlood()
		for _, m := range g.take() {
			m.Finish()
		}
	})
}
