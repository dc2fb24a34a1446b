package nsq

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rdyRig is a consumer and its fake nsqds in a bubble.
type rdyRig struct {
	*fakeCluster
	t     *testing.T
	nodes []*fakeNSQD
	r     *Consumer

	running rdyRunning

	mu   sync.Mutex // guards held
	held []*Message // messages of the handler hold, oldest first
}

// rdyRunning counts handlers that run at the same time.
type rdyRunning struct{ now, most atomic.Int64 }

func (c *rdyRunning) count(h Handler) Handler {
	return HandlerFunc(func(m *Message) error {
		now := c.now.Add(1)
		defer c.now.Add(-1)
		for most := c.most.Load(); now > most && !c.most.CompareAndSwap(most, now); most = c.most.Load() {
		}
		return h.HandleMessage(m)
	})
}

// inRDYBubble runs do with n fake nsqds and a consumer with the given max-in-flight that is not connected yet.
func inRDYBubble(t *testing.T, n, maxInFlight int, tune func(cfg *Config), do func(t *testing.T, g *rdyRig)) {
	synctest.Test(t, func(t *testing.T) {
		g := &rdyRig{t: t, fakeCluster: newFakeCluster(t)}
		for i := range n {
			g.nodes = append(g.nodes, g.add(fmt.Sprintf("nsqd-%d:4150", i+1)))
		}
		g.r = newTestConsumer(t, g.fakeCluster, func(cfg *Config) {
			cfg.MaxInFlight = maxInFlight
			cfg.DefaultRequeueDelay = 0
			if tune != nil {
				tune(cfg)
			}
		})
		t.Cleanup(func() { stopConsumer(t, g.r, time.Minute) })
		do(t, g)
	})
}

// connect connects to the nsqds one after the other, all if none is named, and lets RDY settle.
func (g *rdyRig) connect(nodes ...*fakeNSQD) {
	g.t.Helper()
	if len(nodes) == 0 {
		nodes = g.nodes
	}
	for _, n := range nodes {
		require.NoError(g.t, g.r.ConnectToNSQD(n.addr))
	}
	g.settle()
}

// settle lets all happen that needs no more time than small raises and bursts of joins do.
func (g *rdyRig) settle() {
	time.Sleep(joinBurstMax + 2*raiseRetry)
	synctest.Wait()
}

// rdy returns what each nsqd has read last, budget that moves at once having moved; -1 for one without a connection.
func (g *rdyRig) rdy() []int64 {
	g.t.Helper()
	time.Sleep(minHold)
	return g.rdyNow()
}

func (g *rdyRig) rdyNow() []int64 {
	g.t.Helper()
	synctest.Wait()
	var rdy []int64
	for _, n := range g.nodes {
		if c := n.conn(); c != nil {
			rdy = append(rdy, c.currentRDY())
		} else {
			rdy = append(rdy, -1)
		}
	}
	return rdy
}

// hold is a handler that keeps messages until answer or take.
func (g *rdyRig) hold(m *Message) error {
	m.DisableAutoResponse()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = append(g.held, m)
	return nil
}

// take hands out all messages that are held.
func (g *rdyRig) take() []*Message {
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	held := g.held
	g.held = nil
	return held
}

// rdyCommands returns the lines of all RDY commands over the cluster.
func (g *rdyRig) rdyCommands() []string {
	var lines []string
	for _, e := range g.snapshot(byKind(entryCommand), byLine("RDY ")) {
		lines = append(lines, e.Line)
	}
	return lines
}

// finishing is a handler that takes d over each message.
func finishing(d time.Duration) HandlerFunc {
	return func(*Message) error {
		time.Sleep(d)
		return nil
	}
}

var errRDYTest = errors.New("bad message")

// byBody is a handler that does what the body says.
func byBody(m *Message) error {
	switch string(m.Body) {
	case "bad":
		return errRDYTest
	case "neutral":
		m.RequeueWithoutBackoff(0)
	}
	return nil
}

// rdyFastBackoff has backoff begin at 20 ms and double.
func rdyFastBackoff(cfg *Config) { cfg.BackoffMultiplier = 10 * time.Millisecond }

// The RDY that an answer causes precedes it: programs test this order.
func TestCommandOrder(t *testing.T) {
	tests := map[string]struct {
		tune  func(cfg *Config)
		first []string // a message each after the first RDY and after each answer under RDY 5
		probe []string // a message each after RDY 1
		want  string
	}{
		"failures, then successes": {
			first: []string{"good", "bad"}, probe: []string{"bad", "good", "good"},
			want: "RDY 5, FIN, RDY 0, REQ, RDY 1, RDY 0, REQ, RDY 1, RDY 0, FIN, RDY 1, RDY 5, FIN",
		},
		"requeued without backoff while probing": {
			first: []string{"bad"}, probe: []string{"neutral", "neutral", "good"},
			want: "RDY 5, RDY 0, REQ, RDY 1, RDY 0, REQ, RDY 1, RDY 0, REQ, RDY 1, RDY 5, FIN",
		},
		"requeued without backoff": {
			first: []string{"neutral", "neutral", "good"},
			want:  "RDY 5, REQ, REQ, FIN",
		},
		"backoff is off": {
			tune:  func(cfg *Config) { cfg.MaxBackoffDuration = 0 },
			first: []string{"good", "bad", "bad", "good"},
			want:  "RDY 5, FIN, REQ, REQ, FIN",
		},
		"the first pause is too long": {
			tune:  func(cfg *Config) { cfg.MaxBackoffDuration = 19 * time.Millisecond },
			first: []string{"bad", "good"},
			want:  "RDY 5, REQ, FIN",
		},
		"at the highest level": {
			tune:  func(cfg *Config) { cfg.MaxBackoffDuration = 39 * time.Millisecond },
			first: []string{"bad"}, probe: []string{"bad", "bad", "good"},
			want: "RDY 5, RDY 0, REQ, RDY 1, RDY 0, REQ, RDY 1, RDY 0, REQ, RDY 1, RDY 5, FIN",
		},
		"pauses of no length": {
			tune: func(cfg *Config) {
				cfg.BackoffStrategy = backoffStrategyFunc(func(int) time.Duration { return 0 })
			},
			first: []string{"bad"}, probe: []string{"good"},
			want: "RDY 5, RDY 0, REQ, RDY 1, RDY 5, FIN",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tune := func(cfg *Config) {
				rdyFastBackoff(cfg)
				if tt.tune != nil {
					tt.tune(cfg)
				}
			}
			inRDYBubble(t, 1, 5, tune, func(t *testing.T, g *rdyRig) {
				id, first, probe := 0, tt.first, tt.probe
				n := g.nodes[0]
				n.set(func(b *fakeBehaviour) {
					b.onCommand = func(c *fakeConn, line string, _ []byte) bool {
						return strings.HasPrefix(line, "REQ") // it shall not come again
					}
					b.afterCommand = func(c *fakeConn, line string) {
						from := &first
						switch name, _, _ := strings.Cut(line, " "); {
						case line == "RDY 1":
							from = &probe
						case name != "FIN" && name != "REQ" && line != "RDY 5" || len(first) == 0:
							return
						}
						if len(*from) == 0 {
							return
						}
						id++
						c.sendMessage(fmt.Sprintf("%016x", id), 1, []byte((*from)[0]))
						*from = (*from)[1:]
					}
				})
				g.r.AddHandler(HandlerFunc(byBody))
				g.connect()
				time.Sleep(30 * time.Second) // within the message timeout
				synctest.Wait()
				var order []string
				for _, line := range n.commands("IDENTIFY", "SUB", "NOP") {
					if !strings.HasPrefix(line, "RDY") {
						line = line[:3]
					}
					order = append(order, line)
				}
				require.Equal(t, tt.want, strings.Join(order, ", "))
			})
		})
	}
}

func TestSharesOnTheWire(t *testing.T) {
	for n := 1; n <= 6; n++ {
		inRDYBubble(t, n, 10, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(finishing(0))
			g.connect()
			rdy := g.rdy()
			require.Equal(t, int64(10), rdySum(rdy))
			require.LessOrEqual(t, slices.Max(rdy)-slices.Min(rdy), int64(1))
		})
	}
}

func TestSharesOfConnectionsThatJoinAndLeave(t *testing.T) {
	inRDYBubble(t, 3, 12, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(finishing(0))
		g.connect(g.nodes[0])
		require.Equal(t, []int64{12, -1, -1}, g.rdy())
		g.connect(g.nodes[1])
		require.Equal(t, []int64{6, 6, -1}, g.rdy())
		g.connect(g.nodes[2])
		require.Equal(t, []int64{4, 4, 4}, g.rdy())
		g.nodes[1].down() // it is tried again without end
		synctest.Wait()
		require.Equal(t, []int64{6, -1, 6}, g.rdy(), "at once")
		require.NoError(t, g.r.DisconnectFromNSQD(g.nodes[0].addr))
		g.settle()
		require.Equal(t, []int64{-1, -1, 12}, g.rdy())
		g.nodes[1].up()
		g.nodes[1].waitSubscribed()
		g.settle()
		require.Equal(t, []int64{-1, 6, 6}, g.rdy())

	})
}

func TestMaxRDYCountIsRespected(t *testing.T) {
	inRDYBubble(t, 3, 20, nil, func(t *testing.T, g *rdyRig) {
		g.nodes[0].set(func(b *fakeBehaviour) { b.maxRDY = 3 })
		g.nodes[2].set(func(b *fakeBehaviour) { b.maxRDY = 4 })
		g.r.AddHandler(finishing(0))
		g.connect(g.nodes[0])
		require.Equal(t, []int64{3, -1, -1}, g.rdy())
		g.connect(g.nodes[1:]...)
		require.Equal(t, []int64{3, 13, 4}, g.rdy())
		g.r.ChangeMaxInFlight(1000)
		g.settle()
		require.Equal(t, []int64{3, 993, 4}, g.rdy())
	})
}

func TestASecondNodeGetsItsShareAtOnce(t *testing.T) {
	t.Parallel()
	inRDYBubble(t, 2, 2, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(finishing(0))
		g.connect(g.nodes[0])
		for range 200 {
			require.NoError(t, g.r.ConnectToNSQD(g.nodes[1].addr))
			require.Equal(t, []int64{1, 1}, g.rdy())
			require.NoError(t, g.r.DisconnectFromNSQD(g.nodes[1].addr))
			time.Sleep(200 * time.Millisecond)
			require.Equal(t, []int64{2, -1}, g.rdy())
		}
	})
}

func TestChangeMaxInFlight(t *testing.T) {
	t.Run("acts at once", func(t *testing.T) {
		inRDYBubble(t, 2, 4, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(finishing(0))
			g.connect()
			for _, n := range []int{10, 2, 0, 6, 0, 3, 3, 200} {
				g.r.ChangeMaxInFlight(n)
				require.ElementsMatch(t, []int64{int64(n+1) / 2, int64(n / 2)}, g.rdy(), "no time has passed")
			}
			g.r.ChangeMaxInFlight(-1)
			require.Equal(t, []int64{0, 0}, g.rdy())
		})
	})
	t.Run("before connecting", func(t *testing.T) {
		for _, n := range []int{0, 1, 7} {
			inRDYBubble(t, 1, 4, nil, func(t *testing.T, g *rdyRig) {
				g.r.AddHandler(finishing(0))
				g.r.ChangeMaxInFlight(n)
				g.connect()
				require.Equal(t, []int64{int64(n)}, g.rdy())
			})
		}
	})
	t.Run("a pause lasts across joins, losses and answers", func(t *testing.T) {
		inRDYBubble(t, 3, 6, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(HandlerFunc(g.hold))
			g.nodes[0].publishN(6)
			g.connect(g.nodes[:2]...)
			before := len(g.rdyCommands())
			g.r.ChangeMaxInFlight(0)
			require.Equal(t, []int64{0, 0, -1}, g.rdy())
			g.connect(g.nodes[2])
			g.nodes[1].dropAll()
			time.Sleep(time.Minute / 2)
			for _, m := range g.take() {
				m.Finish()
			}
			time.Sleep(time.Hour)
			require.Equal(t, []int64{0, 0, 0}, g.rdy())
			for _, line := range g.rdyCommands()[before:] {
				require.Equal(t, "RDY 0", line)
			}
			g.r.ChangeMaxInFlight(6)
			require.Equal(t, []int64{2, 2, 2}, g.rdy())
		})
	})
	t.Run("while waiting in backoff", func(t *testing.T) {
		inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(HandlerFunc(g.hold))
			g.nodes[0].publish("1")
			g.connect()
			g.take()[0].Requeue(0)
			require.Equal(t, []int64{0}, g.rdy())
			g.r.ChangeMaxInFlight(9)
			require.Equal(t, []int64{0}, g.rdy())
			g.r.ChangeMaxInFlight(0)
			time.Sleep(time.Minute)
			require.Equal(t, []int64{0}, g.rdy(), "no probe while paused")
			g.r.ChangeMaxInFlight(7)
			require.Equal(t, []int64{1}, g.rdy(), "the probe")
			g.take()[0].Finish()
			require.Equal(t, []int64{7}, g.rdy())
		})
	})
	t.Run("while probing", func(t *testing.T) {
		inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(HandlerFunc(g.hold))
			g.nodes[0].publish("1")
			g.connect()
			g.take()[0].Requeue(time.Hour)
			time.Sleep(2 * time.Second)
			require.Equal(t, []int64{1}, g.rdy())
			g.r.ChangeMaxInFlight(0)
			require.Equal(t, []int64{0}, g.rdy())
			g.r.ChangeMaxInFlight(3)
			require.Equal(t, []int64{1}, g.rdy())
			g.nodes[0].publish("2")
			synctest.Wait()
			g.r.ChangeMaxInFlight(0)
			g.take()[0].Finish()
			require.Equal(t, []int64{0}, g.rdy(), "backoff is over, the pause isn't")
			g.r.ChangeMaxInFlight(4)
			require.Equal(t, []int64{4}, g.rdy())
		})
	})
	t.Run("after a reconnect", func(t *testing.T) {
		inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(finishing(0))
			g.connect()
			g.nodes[0].down()
			g.r.ChangeMaxInFlight(8)
			g.nodes[0].up()
			time.Sleep(20 * time.Second)
			require.Equal(t, []int64{8}, g.rdy())
		})
	})
	t.Run("with more connections than budget", func(t *testing.T) {
		inRDYBubble(t, 5, 8, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(finishing(0))
			g.connect()
			g.r.ChangeMaxInFlight(2)
			require.Equal(t, int64(2), rdySum(g.rdy()))
			g.r.ChangeMaxInFlight(0)
			require.Equal(t, int64(0), rdySum(g.rdy()))
			g.r.ChangeMaxInFlight(3)
			require.Equal(t, int64(3), rdySum(g.rdy()))
			g.r.ChangeMaxInFlight(8)
			require.ElementsMatch(t, []int64{2, 2, 2, 1, 1}, g.rdy())
		})
	})
	t.Run("lower than what is unanswered", func(t *testing.T) {
		inRDYBubble(t, 1, 100, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(HandlerFunc(g.hold))
			g.nodes[0].publishN(1000)
			g.connect()
			g.r.ChangeMaxInFlight(10)
			require.Equal(t, []int64{10}, g.rdy())
			for _, m := range g.take()[:95] {
				m.Finish()
			}
			synctest.Wait()
			require.Equal(t, 10, g.nodes[0].conn().unanswered())
		})
	})
}

// A max-in-flight of "as many as possible" is one, whatever the number of nsqds.
func TestTheLargestMaxInFlight(t *testing.T) {
	for n := 1; n <= 3; n++ {
		inRDYBubble(t, n, math.MaxInt, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(finishing(0))
			g.connect()
			for _, rdy := range g.rdy() {
				require.Equal(t, int64(2500), rdy)
			}
			g.r.ChangeMaxInFlight(2 * n)
			require.Equal(t, int64(2*n), rdySum(g.rdy()))
			g.r.ChangeMaxInFlight(math.MaxInt)
			require.Equal(t, int64(2500*n), rdySum(g.rdy()))
			require.Equal(t, n, g.openConns())
		})
	}
}

func TestRDYIsSentOnlyWhenItChanges(t *testing.T) {
	t.Parallel()
	inRDYBubble(t, 3, 30, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(finishing(time.Millisecond), 10)
		messages := fewer(3334) // at each
		for _, n := range g.nodes {
			n.publishN(messages)
		}
		g.connect()
		g.waitUntil(func() bool {
			return g.nodes[0].stats().Finished+g.nodes[1].stats().Finished+g.nodes[2].stats().Finished == 3*messages
		})
		time.Sleep(time.Minute)
		require.LessOrEqual(t, len(g.rdyCommands()), 20)
		requireNoRepeatedRDY(t, g.fakeCluster)
	})
}

// requireNoRepeatedRDY looks through all connections for a RDY that says what the one before it said.
func requireNoRepeatedRDY(t *testing.T, cluster *fakeCluster) {
	t.Helper()
	last := map[int]string{}
	for _, e := range cluster.snapshot(byKind(entryCommand), byLine("RDY ")) {
		before, ok := last[e.Conn]
		require.NotEqual(t, e.Line, before, "connection %d", e.Conn)
		require.False(t, !ok && e.Line == "RDY 0", "a new connection has RDY 0")
		last[e.Conn] = e.Line
	}
}

func TestIdleBudgetIsLentAndComesBack(t *testing.T) {
	const interval = 2 * time.Second
	tune := func(cfg *Config) { cfg.RDYRedistributeInterval = interval }
	inRDYBubble(t, 4, 8, tune, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(finishing(50*time.Millisecond), 8)
		g.connect()
		require.Equal(t, []int64{2, 2, 2, 2}, g.rdy())
		g.nodes[2].flood(0)
		time.Sleep(interval + 100*time.Millisecond)
		require.Equal(t, []int64{1, 1, 5, 1}, g.rdy(), "lenders keep 1")

		g.nodes[0].flood(0)
		woke := time.Now()
		g.waitUntil(func() bool { return g.nodes[0].conn().currentRDY() >= 2 })
		require.Less(t, time.Since(woke), interval)
		time.Sleep(5 * interval)
		require.Equal(t, []int64{3, 1, 3, 1}, g.rdy())
		_, most := g.unanswered()
		require.LessOrEqual(t, most, 8+2, "each lowering may be late by what was on its way")

		g.nodes[0].stopFlood()
		g.nodes[2].stopFlood()
		time.Sleep(3 * interval)
		require.Equal(t, []int64{2, 2, 2, 2}, g.rdy(), "nobody needs more than others")
		require.LessOrEqual(t, len(g.rdyCommands()), 40)
	})
}

func TestALenderThatWakesGetsItsShareWhileTheBorrowerIsSlow(t *testing.T) {
	inRDYBubble(t, 2, 10, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(finishing(time.Second), 10)
		g.nodes[0].flood(0)
		g.connect()
		time.Sleep(12 * time.Second)
		require.Equal(t, []int64{9, 1}, g.rdy())
		g.nodes[1].flood(0)
		// The rest is the time that the borrower's messages take.
		time.Sleep(time.Second + 2*raiseRetry)
		require.Equal(t, []int64{5, 5}, g.rdy())
	})
}

// rdyTurns has n nodes and the given max-in-flight.
func rdyTurns(t *testing.T, n, maxInFlight int, tune func(cfg *Config), do func(t *testing.T, g *rdyRig)) {
	inRDYBubble(t, n, maxInFlight, tune, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(g.running.count(finishing(40*time.Millisecond)), 10)
		g.connect()
		do(t, g)
		require.LessOrEqual(t, g.running.most.Load(), int64(maxInFlight), "handlers at the same time")
	})
}

func TestAMessageOnAnyOfManyNodesIsHandledSoon(t *testing.T) {
	t.Parallel()
	rdyTurns(t, 20, 1, nil, func(t *testing.T, g *rdyRig) {
		random := rand.New(rand.NewPCG(7, 8))
		for range 25 {
			n := g.nodes[random.IntN(20)]
			id := n.publish("x")[0]
			published := time.Now()
			g.waitUntil(func() bool { return n.isFinished(id) })
			require.LessOrEqual(t, time.Since(published), 20*500*time.Millisecond+100*time.Millisecond)
			time.Sleep(time.Duration(random.IntN(5000)) * time.Millisecond)
		}
		_, most := g.unanswered()
		require.Equal(t, 1, most)
	})
}

func TestBusyNodesGetTheirTurns(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ nodes, maxInFlight int }{
		"1 for 2": {2, 1},
		"2 for 5": {5, 2},
		"3 for 4": {4, 3},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			rdyTurns(t, tt.nodes, tt.maxInFlight, nil, func(t *testing.T, g *rdyRig) {
				last := map[string]time.Time{}
				for _, n := range g.nodes {
					n.flood(0)
					last[n.addr] = time.Now()
				}
				limit := time.Duration((tt.nodes+tt.maxInFlight-1)/tt.maxInFlight)*2*time.Second + 100*time.Millisecond
				g.setChecker(func(e fakeEntry) {
					if e.Kind == entryMessage {
						if wait := e.At.Sub(last[e.NSQD]); wait > limit {
							assert.Fail(t, "a node waits for too long", "%s: %s", e.NSQD, wait)
						}
						last[e.NSQD] = e.At
					}
				})
				time.Sleep(40 * time.Second)
				g.setChecker(nil)
				sum := 0
				for _, n := range g.nodes {
					n.stopFlood()
					sum += n.stats().Finished
				}
				for _, n := range g.nodes {
					share := float64(n.stats().Finished) / float64(sum) * float64(tt.nodes)
					require.Greater(t, share, 0.6, n.addr) // of two: 30 to 70 %
					require.Less(t, share, 1.4, n.addr)
				}
				_, most := g.unanswered()
				require.LessOrEqual(t, most, 2*tt.maxInFlight, "FINs that nsqd has not read yet")
				seconds := 40.0
				require.Less(t, float64(len(g.rdyCommands()))/seconds/float64(tt.maxInFlight), 10.0)
			})
		})
	}
}

// Nothing tells when nsqd has read a lowering, and until then it sends by the RDY before.
func TestABudgetThatMovesIsNotSpentTwiceOnASlowLink(t *testing.T) {
	t.Parallel()
	for _, roundTrip := range []time.Duration{0, 20 * time.Millisecond, 90 * time.Millisecond} {
		t.Run(roundTrip.String(), func(t *testing.T) {
			inRDYBubble(t, 3, 1, nil, func(t *testing.T, g *rdyRig) {
				g.r.AddConcurrentHandlers(g.running.count(finishing(100*time.Millisecond)), 10)
				for _, n := range g.nodes {
					n.set(func(b *fakeBehaviour) { b.readDelay = roundTrip })
				}
				g.connect()
				random := rand.New(rand.NewPCG(1, 2))
				for range 500 {
					g.nodes[random.IntN(len(g.nodes))].publish("x")
					time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
				}
				require.EqualValues(t, 1, g.running.most.Load())
				turns := 0
				for _, line := range g.rdyCommands() {
					if line == "RDY 1" {
						turns++
					}
				}
				require.Greater(t, turns, 20)
			})
		})
	}
}

func TestTurnsNeedFewCommands(t *testing.T) {
	t.Parallel()
	for _, busy := range []int{0, 5, 20} {
		rdyTurns(t, 20, 2, nil, func(t *testing.T, g *rdyRig) {
			for _, n := range g.nodes[:busy] {
				n.flood(300 * time.Millisecond)
			}
			before := len(g.rdyCommands())
			time.Sleep(20 * time.Second)
			require.Less(t, float64(len(g.rdyCommands())-before)/20/2, 10.0, "%d of 20 nodes busy", busy)
			requireNoRepeatedRDY(t, g.fakeCluster)
		})
	}
}

func TestLowRDYOptionsOfOldAreRespected(t *testing.T) {
	turn := func(cfg *Config, busy time.Duration) (took time.Duration) {
		cfg.MaxInFlight = 1
		rdyTurns(t, 2, 1, func(c *Config) { *c = func() Config { cfg.Dial = c.Dial; return *cfg }() }, func(t *testing.T, g *rdyRig) {
			if busy > 0 {
				g.nodes[0].flood(busy)
				g.nodes[1].flood(busy)
			}
			time.Sleep(20 * time.Second)
			moved := g.snapshot(byKind(entryCommand), byLine("RDY 0"))
			require.GreaterOrEqual(t, len(moved), 2)
			took = moved[len(moved)-1].At.Sub(moved[len(moved)-2].At)
		})
		return took
	}
	cfg := NewConfig()
	require.NoError(t, cfg.Set("low_rdy_idle_timeout", "3s"))
	require.Equal(t, 3*time.Second, turn(cfg, 0))
	cfg = NewConfig()
	require.NoError(t, cfg.Set("low_rdy_timeout", "5s"))
	require.InDelta(t, 5, turn(cfg, 100*time.Millisecond).Seconds(), 0.1)
	cfg = NewConfig()
	require.NoError(t, cfg.Set("low_rdy_idle_timeout", "3s"))
	require.NoError(t, cfg.Set("rdy_turn_idle", "700ms"))
	require.Equal(t, 700*time.Millisecond, turn(cfg, 0))
	require.Equal(t, 500*time.Millisecond, turn(NewConfig(), 0))
}

func TestAStuckWriterKeepsItsBudgetOnTheWire(t *testing.T) {
	tune := func(cfg *Config) { cfg.WriteTimeout = 30 * time.Second }
	inRDYBubble(t, 2, 8, tune, func(t *testing.T, g *rdyRig) {
		for _, n := range g.nodes {
			n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		}
		g.r.AddHandler(finishing(0))
		g.connect(g.nodes[0])
		g.nodes[0].stopReading()
		require.NoError(t, g.r.ConnectToNSQD(g.nodes[1].addr))
		for range 29 {
			time.Sleep(time.Second)
			g.r.changed() // however often it looks
			require.Equal(t, []int64{8, 0}, g.rdy(), "the lowering is not written")
		}
		g.nodes[0].startReading()
		require.Equal(t, []int64{4, 4}, g.rdy())

		g.nodes[0].stopReading()
		g.r.ChangeMaxInFlight(2)
		require.Equal(t, []int64{4, 1}, g.rdy(), "the lowering on the other connection")
		g.nodes[0].setReach(reachRefused)
		time.Sleep(31 * time.Second) // the write has failed, and with it the connection
		require.Equal(t, int64(2), g.rdy()[1])
		g.nodes[0].startReading()
	})
}

func TestRaisesWaitForUnansweredMessagesOnTheWire(t *testing.T) {
	inRDYBubble(t, 2, 8, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publishN(20)
		g.nodes[1].publishN(20)
		g.connect(g.nodes[0])
		g.connect(g.nodes[1])
		require.Equal(t, []int64{4, 0}, g.rdy())
		held := g.take()
		require.Len(t, held, 8)
		for i, m := range held {
			m.Finish()
			g.settle()
			now, _ := g.unanswered()
			require.LessOrEqual(t, now, 8)
			require.Equal(t, []int64{4, int64(min(i+1, 4))}, g.rdy())
			if i == 3 {
				break
			}
		}
	})
}

func TestManyConnectsNeedFewCommands(t *testing.T) {
	t.Parallel()
	const n = 200
	inRDYBubble(t, n, 1000, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(finishing(0))
		g.connect()
		require.Equal(t, int64(1000), rdySum(g.rdy()))
		require.LessOrEqual(t, len(g.rdyCommands()), 4*n)
	})
}

func TestMessagesThatFailTogetherAreOneStep(t *testing.T) {
	inRDYBubble(t, 4, 20, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		for _, n := range g.nodes {
			n.publishN(5)
		}
		g.connect()
		held := g.take()
		require.Len(t, held, 20)
		for _, m := range held {
			m.Requeue(0)
		}
		require.Equal(t, []int64{0, 0, 0, 0}, g.rdy())
		status := g.r.Status()
		require.Equal(t, 1, status.BackoffLevel)
		require.Equal(t, 2*time.Second-minHold, time.Until(status.BackoffUntil))
		time.Sleep(2 * time.Second)
		require.Equal(t, int64(1), rdySum(g.rdy()), "one connection probes")
		require.Len(t, g.take(), 1)
	})
}

func TestOldAnswersDecideNothing(t *testing.T) {
	inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publishN(5)
		g.connect()
		held := g.take()
		held[0].Requeue(time.Hour)
		synctest.Wait()
		held[1].Finish()
		synctest.Wait()
		require.Equal(t, 1, g.r.Status().BackoffLevel, "while waiting")
		held[2].Requeue(time.Hour)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.True(t, g.r.Status().BackoffProbing)
		held[3].Finish()
		held[4].Requeue(time.Hour)
		synctest.Wait()
		require.True(t, g.r.Status().BackoffProbing, "while probing")
		require.Equal(t, 1, g.r.Status().BackoffLevel)
		require.Equal(t, []int64{1}, g.rdy())
		g.nodes[0].publish("probe")
		g.take()[0].Finish()
		require.Equal(t, []int64{5}, g.rdy())
	})
}

func TestTheProbeGoesWhereNothingIsUnanswered(t *testing.T) {
	for free := range 3 {
		inRDYBubble(t, 3, 9, nil, func(t *testing.T, g *rdyRig) {
			g.r.AddHandler(HandlerFunc(g.hold))
			g.connect()
			for i, n := range g.nodes {
				if i != free {
					n.publishN(2)
				}
			}
			held := g.take()
			g.nodes[free].publish("bad")
			g.take()[0].Requeue(time.Hour)
			time.Sleep(2 * time.Second)
			want := []int64{0, 0, 0}
			want[free] = 1
			require.Equal(t, want, g.rdy())
			for _, m := range held {
				m.Finish()
			}
		})
	}
}

func TestTheProbeMovesOnFrom(t *testing.T) {
	type probe struct {
		*rdyRig
		at int // index of the node that probes
	}
	tests := map[string]struct {
		do    func(p probe)
		limit time.Duration
	}{
		"an idle connection":       {func(probe) {}, 500 * time.Millisecond},
		"one that is lost":         {func(p probe) { p.nodes[p.at].down() }, 0},
		"one that nsqd hangs up":   {func(p probe) { p.nodes[p.at].setReach(reachRefused); p.nodes[p.at].closeAll() }, 0},
		"one that is disconnected": {func(p probe) { require.NoError(p.t, p.r.DisconnectFromNSQD(p.nodes[p.at].addr)) }, minHold},
		"a message lost with its connection": {func(p probe) {
			p.nodes[p.at].publish("x")
			p.take()
			p.nodes[p.at].down()
		}, 0},
		"a message that expires": {func(p probe) {
			p.nodes[p.at].publish("x")
			p.take()
			p.nodes[p.at].set(func(b *fakeBehaviour) { b.paused = true })
		}, time.Minute + 500*time.Millisecond},
		"a message that is requeued without backoff": {func(p probe) {
			p.nodes[p.at].publish("x")
			p.take()[0].RequeueWithoutBackoff(time.Hour)
		}, 2*time.Second + 500*time.Millisecond},
		"a message that fails": {func(p probe) {
			p.nodes[p.at].publish("x")
			p.take()[0].Requeue(time.Hour)
		}, 4*time.Second + 500*time.Millisecond},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inRDYBubble(t, 3, 9, nil, func(t *testing.T, g *rdyRig) {
				g.r.AddHandler(HandlerFunc(g.hold))
				g.nodes[0].publish("bad")
				g.connect()
				g.take()[0].Requeue(time.Hour)
				time.Sleep(2*time.Second - joinBurstMax) // settled already
				g.waitUntil(func() bool { return slices.Contains(g.rdyNow(), 1) })
				at := slices.Index(g.rdyNow(), 1)
				tt.do(probe{g, at})
				start := time.Now()
				g.waitUntil(func() bool {
					i := slices.Index(g.rdyNow(), 1)
					return i >= 0 && i != at
				})
				require.LessOrEqual(t, time.Since(start), tt.limit)
			})
		})
	}
}

// The probe goes to the one connection that can have it, whatever keeps it from the others.
func TestTheProbeFindsTheOnlyConnectionThatCanHaveIt(t *testing.T) {
	inRDYBubble(t, 5, 10, nil, func(t *testing.T, g *rdyRig) {
		stuck, closing, lost, busy, free := g.nodes[0], g.nodes[1], g.nodes[2], g.nodes[3], g.nodes[4]
		stuck.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 10)
		g.connect()
		busy.publish("1")
		closing.publish("2")
		synctest.Wait()
		free.publish("bad")
		held := g.take()
		held[len(held)-1].Requeue(time.Hour)
		synctest.Wait()
		stuck.stopReading() // RDY 0 is written, and what comes next is stuck
		stuck.conn().sendHeartbeat()
		require.NoError(t, g.r.DisconnectFromNSQD(closing.addr))
		lost.down()
		start := time.Now()
		g.waitUntil(func() bool { return free.conn().currentRDY() == 1 })
		require.LessOrEqual(t, time.Since(start), 2*time.Second+5*500*time.Millisecond)
		require.Equal(t, []int64{0, 0, -1, 0, 1}, g.rdy())
		free.publish("good")
		g.take()[0].Finish()
		synctest.Wait()
		require.Zero(t, g.r.Status().BackoffLevel)
		for _, m := range held {
			m.Finish()
		}
		stuck.startReading()
		g.settle()
		require.Equal(t, []int64{4, -1, -1, 3, 3}, g.rdy())
	})
}

func TestTheProbeVisitsAllIdleNodes(t *testing.T) {
	inRDYBubble(t, 5, 10, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publish("bad")
		g.connect()
		g.take()[0].Requeue(time.Hour)
		time.Sleep(2 * time.Second)
		g.nodes[3].publish("x") // wherever the probe begins, it finds the message
		start := time.Now()
		g.waitUntil(func() bool { return g.nodes[3].stats().InFlight == 1 })
		require.LessOrEqual(t, time.Since(start), 5*500*time.Millisecond)
		g.take()[0].Finish()
		require.Equal(t, int64(10), rdySum(g.rdy()))
	})
}

// What comes while the probe's RDY waits behind a write that is stuck is no probe.
func TestAMessageBeforeTheProbesRDYIsWrittenDecidesNothing(t *testing.T) {
	inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
		n := g.nodes[0]
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		g.r.AddConcurrentHandlers(HandlerFunc(g.hold), 1)
		n.publishN(3)
		g.connect()
		held := g.take()
		held[0].Requeue(time.Hour)
		synctest.Wait()
		n.stopReading()
		held[1].Finish() // stuck
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.True(t, g.r.Status().BackoffProbing)
		n.conn().sendMessage("00000000000000aa", 1, []byte("straggler"))
		g.take()[0].Requeue(0)
		synctest.Wait()
		n.startReading()
		synctest.Wait()
		require.Equal(t, 1, g.r.Status().BackoffLevel)
		require.True(t, g.r.Status().BackoffProbing)
		require.Equal(t, []int64{1}, g.rdy())
		held[2].Finish()
	})
}

func TestNoProbeWhereAHigherRDYIsStillKnown(t *testing.T) {
	tune := func(cfg *Config) { cfg.WriteTimeout = time.Minute }
	inRDYBubble(t, 1, 5, tune, func(t *testing.T, g *rdyRig) {
		n := g.nodes[0]
		n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		g.r.AddHandler(HandlerFunc(g.hold))
		n.publishN(2)
		g.connect()
		held := g.take()
		require.Len(t, held, 2)
		n.stopReading()
		held[0].Finish() // stuck
		synctest.Wait()
		held[1].Requeue(time.Hour) // with RDY 0 before it, which waits behind the FIN
		time.Sleep(3 * time.Second)
		require.Equal(t, []int64{5}, g.rdy())
		n.publishN(3) // nsqd sends them by its RDY of 5
		held = g.take()
		require.Len(t, held, 3)
		for _, m := range held {
			m.Requeue(time.Hour)
		}
		synctest.Wait()
		require.Equal(t, 1, g.r.Status().BackoffLevel, "none of them was a probe")
		n.startReading()
		require.Equal(t, []int64{1}, g.rdy())
		require.Equal(t, 1, g.r.Status().BackoffLevel)
		require.Equal(t, []string{"RDY 5", "RDY 0", "RDY 1"}, g.rdyCommands())
	})
}

func TestBackoffOffNeverLowersRDY(t *testing.T) {
	t.Parallel()
	tune := func(cfg *Config) { cfg.MaxBackoffDuration = 0 }
	inRDYBubble(t, 2, 10, tune, func(t *testing.T, g *rdyRig) {
		g.r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
			time.Sleep(time.Millisecond)
			if m.Attempts == 1 {
				return errRDYTest
			}
			return nil
		}), 10)
		g.connect()
		before := g.rdyCommands()
		for _, n := range g.nodes {
			n.publishN(1000)
		}
		g.waitUntil(func() bool { return g.nodes[0].stats().Finished+g.nodes[1].stats().Finished == 2000 })
		require.Equal(t, before, g.rdyCommands())
	})
}

func TestBackoffOutlivesItsConnections(t *testing.T) {
	inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publish("bad", "good")
		g.connect()
		g.take()[0].Requeue(time.Hour)
		synctest.Wait()
		g.nodes[0].down()
		time.Sleep(10 * time.Minute) // the pause is long over
		require.Equal(t, []int64{-1}, g.rdy())
		before := len(g.rdyCommands())
		g.nodes[0].up()
		g.waitUntil(func() bool { return len(g.take()) > 0 })
		require.Equal(t, "RDY 1", g.rdyCommands()[before], "the probe")
	})
}

func TestRecoveryGivesTheFullBudget(t *testing.T) {
	for _, n := range []int{1, 3} {
		inRDYBubble(t, n, 10, rdyFastBackoff, func(t *testing.T, g *rdyRig) {
			bad := 3
			g.r.AddHandler(HandlerFunc(func(m *Message) error {
				if bad--; bad >= 0 {
					return errRDYTest
				}
				return nil
			}))
			g.connect()
			g.nodes[0].publishN(50)
			g.waitUntil(func() bool { return g.nodes[0].stats().Finished == 50 })
			synctest.Wait()
			require.Equal(t, int64(10), rdySum(g.rdy()))
			require.Zero(t, g.r.Status().BackoffLevel)
			time.Sleep(time.Minute)
			rdy := g.rdy()
			require.Equal(t, int64(10), rdySum(rdy))
			require.LessOrEqual(t, slices.Max(rdy)-slices.Min(rdy), int64(1))
		})
	}
}

func TestRecoveryAfterManyFailuresIsBounded(t *testing.T) {
	t.Parallel()
	tune := func(cfg *Config) { // levels 1 to 5
		rdyFastBackoff(cfg)
		cfg.MaxBackoffDuration = 400 * time.Millisecond
		cfg.MaxAttempts = 0
	}
	inRDYBubble(t, 1, 5, tune, func(t *testing.T, g *rdyRig) {
		failing := true
		g.r.AddHandler(HandlerFunc(func(m *Message) error {
			if failing {
				return errRDYTest
			}
			return nil
		}))
		g.nodes[0].publishN(100)
		g.connect()
		g.waitUntil(func() bool { return g.nodes[0].stats().Requeued == 1000 })
		failing = false
		start := time.Now()
		g.waitUntil(func() bool { return g.nodes[0].stats().Finished == 100 })
		require.LessOrEqual(t, time.Since(start), (320+320+160+80+40+20)*time.Millisecond)
		require.Equal(t, []int64{5}, g.rdy())
	})
}

func TestRDYValuesAreWithinMaxInFlight(t *testing.T) {
	tune := func(cfg *Config) {
		rdyFastBackoff(cfg)
		cfg.MaxBackoffDuration = 100 * time.Millisecond
		cfg.MaxAttempts = 0
	}
	inRDYBubble(t, 3, 7, tune, func(t *testing.T, g *rdyRig) {
		g.setChecker(func(e fakeEntry) {
			if e.Kind == entryCommand && e.name() == "RDY" {
				n, err := strconv.Atoi(e.words()[1])
				assert.True(t, err == nil && 0 <= n && n <= 7, e.Line)
			}
		})
		g.r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
			time.Sleep(time.Millisecond)
			if m.Attempts < 3 {
				return errRDYTest
			}
			return nil
		}), 7)
		for _, n := range g.nodes {
			n.publishN(30)
		}
		g.connect()
		time.Sleep(10 * time.Minute)
		for _, n := range g.nodes {
			require.Equal(t, 30, n.stats().Finished)
		}
	})
}

func TestThereIsOneProbeAtATime(t *testing.T) {
	tests := map[string]func(g *rdyRig, at *fakeNSQD){
		"after a pause": func(g *rdyRig, _ *fakeNSQD) {
			g.r.ChangeMaxInFlight(0)
			synctest.Wait()
			g.r.ChangeMaxInFlight(9)
		},
		"while the connection that probed is closing": func(g *rdyRig, at *fakeNSQD) {
			require.NoError(g.t, g.r.DisconnectFromNSQD(at.addr))
		},
	}
	for name, disturb := range tests {
		t.Run(name, func(t *testing.T) {
			inRDYBubble(t, 3, 9, nil, func(t *testing.T, g *rdyRig) {
				g.r.AddHandler(HandlerFunc(g.hold))
				g.connect()
				g.nodes[0].publish("bad")
				g.take()[0].Requeue(time.Hour)
				synctest.Wait()
				for _, n := range g.nodes {
					n.publishN(5)
				}
				time.Sleep(2 * time.Second)
				at := g.nodes[slices.Index(g.rdy(), 1)]
				probe := g.take()
				require.Len(t, probe, 1)
				disturb(g, at)
				time.Sleep(10 * time.Second)
				require.Empty(t, g.take(), "no other message while the probe is unanswered")
				probe[0].Finish()
				synctest.Wait()
				require.Zero(t, g.r.Status().BackoffLevel)
				require.NotEmpty(t, g.take())
			})
		})
	}
}

func TestAMessageThatComesWhileTheProbeIsWithdrawnIsTheProbe(t *testing.T) {
	inRDYBubble(t, 2, 5, nil, func(t *testing.T, g *rdyRig) {
		for _, n := range g.nodes {
			n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
		}
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publish("bad")
		g.connect()
		g.take()[0].Requeue(time.Hour)
		time.Sleep(2 * time.Second)
		at := slices.Index(g.rdy(), 1)
		g.nodes[at].stopReading()
		time.Sleep(600 * time.Millisecond) // its turn is over, but RDY 0 is stuck
		g.nodes[at].publish("late")
		g.nodes[1-at].publish("other")
		probe := g.take()
		require.Len(t, probe, 1)
		g.nodes[at].startReading()
		time.Sleep(10 * time.Second)
		require.Empty(t, g.take(), "no other message while the probe is unanswered")
		probe[0].Finish()
		synctest.Wait()
		require.Zero(t, g.r.Status().BackoffLevel, "it has decided")
		g.take()[0].Finish()
	})
}
