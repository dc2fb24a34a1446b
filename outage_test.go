package nsq

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// recovered checks that a rig is as if nothing had been: the messages of all nodes come, under the whole budget, and
// backoff ends by successes. The messages so far are finished when they come again.
func (g *rdyRig) recovered(t *testing.T) {
	t.Helper()
	finish := func() {
		for _, m := range g.take() {
			m.Finish()
		}
	}
	for round := 0; ; round++ {
		for _, n := range g.nodes {
			n.publish("more")
		}
		for range 10 {
			time.Sleep(time.Second)
			finish()
		}
		if g.r.Status().BackoffLevel == 0 {
			break
		}
		require.Less(t, round, 30, "backoff does not end by successes")
	}
	finish()
	time.Sleep(2 * time.Minute) // what was in flight on lost connections comes again
	g.waitUntil(func() bool {
		finish()
		for _, n := range g.nodes {
			if s := n.stats(); s.Depth+s.InFlight+s.Deferred > 0 {
				return false
			}
		}
		return true
	})
	g.settle()
	require.Equal(t, g.r.maxInFlight.Load(), rdySum(g.rdy()))
	for _, n := range g.nodes {
		require.Equal(t, n.stats().Published, n.stats().Finished)
	}
	now, _ := g.fakeCluster.unanswered()
	require.Zero(t, now)
}

// All nsqds go at once, and come back much later: whatever was going on, all of it goes on.
func TestAllNSQDsGoAndComeBack(t *testing.T) {
	t.Parallel()
	during := map[string]func(t *testing.T, g *rdyRig){
		"idle": func(*testing.T, *rdyRig) {},
		"all of the budget in handlers": func(t *testing.T, g *rdyRig) {
			for _, n := range g.nodes {
				n.publishN(5)
			}
			synctest.Wait()
		},
		"waiting in backoff": func(t *testing.T, g *rdyRig) {
			g.nodes[0].publish("bad")
			g.take()[0].Requeue(time.Hour)
			synctest.Wait()
		},
		"the probe in a handler": func(t *testing.T, g *rdyRig) {
			g.nodes[0].publish("bad")
			g.take()[0].Requeue(0)
			time.Sleep(5 * time.Second)
		},
		"more nsqds than budget": func(t *testing.T, g *rdyRig) {
			g.r.ChangeMaxInFlight(2)
			g.nodes[1].publishN(2)
			time.Sleep(3 * time.Second)
		},
		"paused, and the pause ends during the outage": func(t *testing.T, g *rdyRig) {
			g.r.ChangeMaxInFlight(0)
			time.AfterFunc(3*time.Minute, func() { g.r.ChangeMaxInFlight(9) })
		},
	}
	gone := map[string]func(n *fakeNSQD){
		"crashed":   (*fakeNSQD).down,
		"shut down": func(n *fakeNSQD) { n.setReach(reachRefused); n.closeAll() },
		"cut off": func(n *fakeNSQD) {
			n.setReach(reachHangs)
			n.set(func(b *fakeBehaviour) { b.silent = true })
			n.stopReading()
		},
	}
	for what, begin := range during {
		for how, act := range gone {
			t.Run(what+", "+how, func(t *testing.T) {
				inRDYBubble(t, 3, 9, nil, func(t *testing.T, g *rdyRig) {
					g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 3)
					g.connect()
					begin(t, g)
					for _, n := range g.nodes {
						act(n)
					}
					time.Sleep(5 * time.Minute)
					require.Empty(t, nsqdsConnected(g.r))
					for _, n := range g.nodes {
						n.dropAll()
						n.startReading()
						n.set(func(b *fakeBehaviour) { b.silent = false })
						n.up()
					}
					time.Sleep(g.r.config.MaxReconnectInterval + g.r.config.DialTimeout)
					require.Len(t, nsqdsConnected(g.r), 3)
					g.take() // what nobody will answer any more
					if strings.Contains(what, "2") {
						g.r.ChangeMaxInFlight(9)
					}
					g.recovered(t)
				})
			})
		}
	}
}

// The only connection ends in each phase of backoff, in each way: there is a next probe, and by successes all is as before.
func TestTheOnlyConnectionEndsInEachPhaseOfBackoff(t *testing.T) {
	t.Parallel()
	phases := map[string]func(t *testing.T, g *rdyRig, n *fakeNSQD){
		"the failure is being written": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			m := g.take()[0]
			n.stopReading()
			m.Requeue(0)
		},
		"waiting": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(time.Hour)
			time.Sleep(time.Second)
		},
		"waiting, with messages unanswered": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publishN(3)
			g.take()[0].Requeue(time.Hour)
			time.Sleep(time.Second)
		},
		"the RDY of the probe is being written": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(time.Hour)
			time.Sleep(time.Second)
			n.stopReading()
			time.Sleep(1500 * time.Millisecond)
		},
		"probing, nothing comes": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(time.Hour)
			time.Sleep(3 * time.Second)
			require.Equal(t, []int64{1}, g.rdy())
		},
		"the probe is in a handler": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(0)
			time.Sleep(3 * time.Second)
			require.Equal(t, 1, n.stats().InFlight)
		},
		"the probe's success is being written": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(0)
			time.Sleep(3 * time.Second)
			n.stopReading()
			g.take()[0].Finish()
		},
		"the probe's failure is being written": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(0)
			time.Sleep(3 * time.Second)
			n.stopReading()
			g.take()[0].Requeue(time.Minute)
		},
		"the probe has expired": func(t *testing.T, g *rdyRig, n *fakeNSQD) {
			n.publish("bad")
			g.take()[0].Requeue(0)
			time.Sleep(3 * time.Second)
			n.set(func(b *fakeBehaviour) { b.paused = true })
			time.Sleep(time.Minute)
			n.set(func(b *fakeBehaviour) { b.paused = false })
		},
	}
	ends := map[string]func(g *rdyRig, n *fakeNSQD){
		"a reset":        func(_ *rdyRig, n *fakeNSQD) { n.dropAll() },
		"nsqd hangs up":  func(_ *rdyRig, n *fakeNSQD) { n.closeAll() },
		"a long silence": func(_ *rdyRig, n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.silent = true }) },
		"a write that times out": func(g *rdyRig, n *fakeNSQD) {
			n.stopReading()
			g.r.ChangeMaxInFlight(4) // so that there is something to write, in most phases
		},
		"Disconnect and Connect": func(g *rdyRig, n *fakeNSQD) {
			require.NoError(g.t, g.r.DisconnectFromNSQD(n.addr))
			time.Sleep(time.Minute)
			n.startReading()
			require.NoError(g.t, g.r.ConnectToNSQD(n.addr))
		},
		"it does not end": func(*rdyRig, *fakeNSQD) {},
	}
	for phase, begin := range phases {
		for how, end := range ends {
			t.Run(phase+", "+how, func(t *testing.T) {
				inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
					n := g.nodes[0]
					n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
					g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 5)
					g.connect()
					begin(t, g, n)
					synctest.Wait()
					end(g, n)
					time.Sleep(70 * time.Second) // longer than silence, writes and messages last
					n.startReading()
					n.set(func(b *fakeBehaviour) { b.silent = false })
					n.waitSubscribed()
					g.take() // what nobody will answer any more
					g.recovered(t)
				})
			})
		}
	}
}

// What handlers never answer holds the whole budget. When its connection dies, the budget is another one's at once.
func TestBudgetOfADeadConnectionGoesToTheOthers(t *testing.T) {
	inRDYBubble(t, 2, 10, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 10)
		g.connect(g.nodes[0])
		g.nodes[0].publishN(20)
		synctest.Wait()
		require.Equal(t, 10, g.nodes[0].stats().InFlight)
		g.connect(g.nodes[1])
		g.nodes[1].publishN(20)
		require.Equal(t, []int64{5, 0}, g.rdy(), "all of it is unanswered")
		start := time.Now()
		g.nodes[0].down()
		require.Equal(t, []int64{-1, 10}, g.rdy())
		require.Equal(t, 10, g.nodes[1].stats().InFlight)
		require.LessOrEqual(t, time.Since(start), 10*time.Millisecond)
	})
}

// A connection that is always busy gives way to a new one as its messages are answered.
func TestANewNodeIsServedBesideABusyOne(t *testing.T) {
	t.Parallel()
	inRDYBubble(t, 2, 10, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(finishing(100*time.Millisecond), 10)
		g.nodes[0].flood(0)
		g.connect(g.nodes[0])
		for range 20 {
			g.nodes[1].publish("x")
			start := time.Now()
			require.NoError(t, g.r.ConnectToNSQD(g.nodes[1].addr))
			g.waitUntil(func() bool { return g.nodes[1].stats().InFlight == 1 })
			require.LessOrEqual(t, time.Since(start), 100*time.Millisecond)
			g.settle()
			require.Equal(t, int64(10), rdySum(g.rdy()))
			require.NoError(t, g.r.DisconnectFromNSQD(g.nodes[1].addr))
			time.Sleep(time.Second)
			require.Equal(t, []int64{10, -1}, g.rdy())
		}
		g.nodes[0].stopFlood()
	})
}

// The default max-in-flight is 1: two nsqds are served in turns, and that is told.
func TestDefaultConfigServesTwoNSQDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "a:4150", "b:4150")
		r := newTestConsumer(t, cluster, nil)
		var log syncedLines
		r.SetLogger(&log, LogLevelWarning)
		r.AddConcurrentHandlers(finishing(10*time.Millisecond), 50)
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
		for _, n := range []*fakeNSQD{cluster.nsqd("a:4150"), cluster.nsqd("b:4150")} {
			n.publishN(200)
		}
		time.Sleep(20 * time.Second)
		for _, n := range []*fakeNSQD{cluster.nsqd("a:4150"), cluster.nsqd("b:4150")} {
			require.Equal(t, 200, n.stats().Finished)
		}
		require.Contains(t, log.text(), "2 nsqds take turns with a max-in-flight of 1")
		require.Contains(t, log.text(), "max-in-flight 1 keeps 49 of 50 handlers idle")
	})
}

// A REQ that can't be written costs no budget, with backoff on or off.
func TestARequeueThatIsNotWrittenCostsNoBudget(t *testing.T) {
	for name, off := range map[string]bool{"backoff is on": false, "backoff is off": true} {
		t.Run(name, func(t *testing.T) {
			tune := func(cfg *Config) {
				if off {
					cfg.MaxBackoffDuration = 0
				}
			}
			inRDYBubble(t, 2, 6, tune, func(t *testing.T, g *rdyRig) {
				for _, n := range g.nodes {
					n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
				}
				g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 6)
				g.connect()
				for range 10 {
					g.nodes[0].publish("x")
					m := g.take()[0]
					g.nodes[0].stopReading()
					m.Requeue(0)
					synctest.Wait()
					g.nodes[0].dropAll()
					g.nodes[0].startReading()
					g.nodes[0].waitSubscribed()
					g.nodes[0].expire()
					g.recovered(t)
				}
			})
		})
	}
}
