package nsq

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// newDirectConsumer returns a silent consumer with a handler that finishes all. It is stopped when the bubble ends.
func newDirectConsumer(t *testing.T, cluster *fakeCluster, tune func(cfg *Config)) *Consumer {
	t.Helper()
	r := newTestConsumer(t, cluster, func(cfg *Config) {
		cfg.MaxInFlight = 100 // or RDY would move all the time
		if tune != nil {
			tune(cfg)
		}
	})
	r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
	t.Cleanup(func() { stopConsumer(t, r, time.Minute) })
	return r
}

// nodeGaps are the times between dials.
func nodeGaps(dials []time.Time) (gaps []time.Duration) {
	for i := 1; i < len(dials); i++ {
		gaps = append(gaps, dials[i].Sub(dials[i-1]))
	}
	return gaps
}

func TestReconnectDelayDoublesWithFullJitterUpToACap(t *testing.T) {
	cfg := NewConfig()
	for failures, limit := range map[int]time.Duration{
		1: 250 * time.Millisecond, 2: 500 * time.Millisecond, 3: time.Second, 4: 2 * time.Second, 5: 4 * time.Second,
		6: 8 * time.Second, 7: 15 * time.Second, 8: 15 * time.Second, 100: 15 * time.Second, 1 << 30: 15 * time.Second,
	} {
		var all []time.Duration
		for range 1000 {
			all = append(all, reconnectDelay(cfg, failures))
		}
		slices.Sort(all)
		require.GreaterOrEqual(t, all[0], time.Duration(0))
		require.LessOrEqual(t, all[999], limit)
		// Over the whole interval: each of these fails once in 10^40 runs.
		require.Less(t, all[0], limit/10, "%d failures", failures)
		require.Greater(t, all[999], limit-limit/10, "%d failures", failures)
	}
	cfg.ReconnectInterval, cfg.MaxReconnectInterval = time.Millisecond, time.Millisecond
	require.LessOrEqual(t, reconnectDelay(cfg, 50), time.Millisecond)
	cfg.MaxReconnectInterval, cfg.ReconnectInterval = time.Hour, 5*time.Minute
	for failures := range 100 {
		d := reconnectDelay(cfg, failures)
		require.True(t, 0 <= d && d <= time.Hour, "%s", d)
	}
}

func TestLostConnectionIsMadeAgain(t *testing.T) {
	lose := map[string]func(n *fakeNSQD){
		"reset":               (*fakeNSQD).dropAll,
		"nsqd shuts down":     (*fakeNSQD).closeAll,
		"nsqd is refused":     func(n *fakeNSQD) { n.conn().sendError("E_INVALID cannot do that") },
		"nsqd makes no sense": func(n *fakeNSQD) { n.conn().sendSize(-5) },
	}
	for name, act := range lose {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				r := newDirectConsumer(t, n.cluster, nil)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				for i := range 20 {
					time.Sleep(2 * time.Second)
					lost := time.Now()
					act(n)
					n.cluster.waitEntries(i+2, byKind(entryDialed))
					require.LessOrEqual(t, time.Since(lost), r.config.ReconnectInterval, "the first delay, each time anew")
					n.waitSubscribed()
				}
				n.publish("x")
				n.cluster.waitUntil(func() bool { return n.stats().Finished == 1 })
			})
		})
	}
}

func TestReconnectingGoesOnForEver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		time.Sleep(5 * time.Second)
		n.down()
		lost := time.Now()
		time.Sleep(6 * time.Hour)
		dials := n.dialTimes()[1:]
		require.LessOrEqual(t, dials[0].Sub(lost), 250*time.Millisecond)
		limit := 500 * time.Millisecond
		for _, gap := range nodeGaps(dials) {
			require.LessOrEqual(t, gap, limit)
			limit = min(2*limit, 15*time.Second)
		}
		// 2880 tries of 7.5 s on average; the deviation of their number is about 30.
		require.InDelta(t, 2880, len(dials), 500)
		n.up()
		time.Sleep(15 * time.Second)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r))
		time.Sleep(time.Second)
		n.dropAll()
		time.Sleep(250 * time.Millisecond)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r), "after a connection that was of use it is quick again")
	})
}

func TestConnectionThatDiesAtOnceDoesNotResetTheDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.set(func(b *fakeBehaviour) { // subscribed, and thrown out
			b.afterCommand = func(c *fakeConn, line string) {
				if line == "SUB t c" {
					c.close()
				}
			}
		})
		n.dropAll()
		time.Sleep(time.Hour)
		tries := len(n.dialTimes())
		require.Less(t, tries, 700, "no storm: about 480 are due at the cap")
		require.Greater(t, tries, 300)
	})
}

func TestConnectionWithMessagesResetsTheDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		for i := range 50 {
			if i%maxShortLives == 0 {
				time.Sleep(time.Second)
			}
			n.publish("x")
			n.cluster.waitUntil(func() bool { return n.stats().Finished == i+1 })
			lost := time.Now()
			n.dropAll() // well within the first second, but for some
			n.waitSubscribed()
			require.LessOrEqual(t, time.Since(lost), 250*time.Millisecond)
		}
	})
}

// A message that each connection dies of makes no storm.
func TestConnectionsThatDieOfTheirFirstMessageAreMadeSlowly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		n.set(func(b *fakeBehaviour) {
			b.afterCommand = func(c *fakeConn, line string) {
				if strings.HasPrefix(line, "FIN ") {
					c.close()
				}
			}
		})
		n.flood(0)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		minutes := fewer(60)
		time.Sleep(time.Duration(minutes) * time.Minute)
		t.Logf("%d dials in %d minutes", len(n.dialTimes()), minutes)
		require.Less(t, len(n.dialTimes()), 100+10*minutes)
	})
}

func TestRefusedSubscriptionIsTriedAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.set(func(b *fakeBehaviour) { b.refuseSubs = 3 })
		n.dropAll()
		lost := time.Now()
		n.cluster.waitEntries(5, byKind(entryDialed))
		n.waitSubscribed()
		require.LessOrEqual(t, time.Since(lost), (250+500+1000+2000)*time.Millisecond)
		time.Sleep(time.Minute)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r))
		require.Len(t, n.dialTimes(), 5)
		require.Equal(t, 1, n.stats().Conns)
	})
}

func TestReconnectAsksForTheConfiguredNameAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The name stands for another machine at each dial.
		cluster := newFakeCluster(t, "10.0.0.0:4150", "10.0.0.1:4150", "10.0.0.2:4150")
		var mu sync.Mutex
		var dialled []string
		r := newDirectConsumer(t, cluster, func(cfg *Config) {
			cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				mu.Lock()
				target := cluster.nsqdAddrs()[len(dialled)%3]
				dialled = append(dialled, network+" "+addr)
				mu.Unlock()
				return cluster.Dial(ctx, network, target)
			}
		})
		require.NoError(t, r.ConnectToNSQD("nsqd.example:4150"))
		for i := range 5 {
			n := cluster.nsqd(cluster.nsqdAddrs()[i%3])
			n.waitSubscribed()
			require.Equal(t, "nsqd.example:4150", r.Status().NSQDs[0].Address)
			n.dropAll()
			time.Sleep(20 * time.Second)
		}
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, slices.Repeat([]string{"tcp nsqd.example:4150"}, 6), dialled)
	})
}

// nsqdAddrs are the addresses of the cluster's nsqds, sorted.
func (c *fakeCluster) nsqdAddrs() (addrs []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr := range c.nsqds {
		addrs = append(addrs, addr)
	}
	slices.Sort(addrs)
	return addrs
}

func TestFiftyRestartsLeaveOneConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "a:4150", "b:4150")
		a, b := cluster.nsqd("a:4150"), cluster.nsqd("b:4150")
		r := newDirectConsumer(t, cluster, nil)
		require.NoError(t, r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
		for range 50 {
			a.down()
			time.Sleep(3 * time.Second)
			require.Equal(t, []string{"b:4150"}, nsqdsConnected(r))
			a.up()
			a.waitSubscribed()
			time.Sleep(time.Second)
			require.Equal(t, 1, a.stats().Conns)
		}
		require.Equal(t, 2, r.Stats().Connections)
		require.Len(t, r.Status().NSQDs, 2)
		require.Len(t, b.dialTimes(), 1)
		require.NoError(t, r.DisconnectFromNSQD("a:4150"), "once is enough")
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQD("a:4150"))
		tries := len(a.dialTimes())
		time.Sleep(time.Hour)
		require.Len(t, a.dialTimes(), tries)
		require.Zero(t, a.stats().Conns)
	})
}

func TestFirstConnectThatFailsIsNotTriedAgain(t *testing.T) {
	fail := map[string]func(n *fakeNSQD){
		"refused":              func(n *fakeNSQD) { n.down() },
		"black hole":           func(n *fakeNSQD) { n.setReach(reachHangs) },
		"silent":               func(n *fakeNSQD) { n.setReach(reachSilent) },
		"subscription refused": func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.refuseSubs = 1 }) },
		"hung up":              func(n *fakeNSQD) { n.at("IDENTIFY", fakeStep{hangUp: true}) },
	}
	for name, act := range fail {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				act(n)
				r := newDirectConsumer(t, n.cluster, nil)
				err := r.ConnectToNSQD(n.addr)
				require.Error(t, err)
				row := r.Status().NSQDs[0]
				require.Equal(t, NodeFailed, row.State)
				require.Equal(t, err, row.LastError)
				require.Zero(t, row.NextTry)
				n.set(func(b *fakeBehaviour) { clear(b.steps) })
				n.up()
				time.Sleep(time.Hour)
				require.Len(t, n.dialTimes(), 1)
				require.Zero(t, n.stats().Conns)

				require.NoError(t, r.ConnectToNSQD(n.addr), "but by hand")
				n.dropAll()
				time.Sleep(time.Second)
				require.Equal(t, []string{n.addr}, nsqdsConnected(r), "and from then on by itself")
			})
		})
	}
}

func TestFailedAddressStaysListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.down()
		r := newDirectConsumer(t, n.cluster, nil)
		require.Error(t, r.ConnectToNSQD(n.addr))
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQD(n.addr))
		require.Empty(t, r.Status().NSQDs)
	})
}

func TestReconnectingStopsAtOnce(t *testing.T) {
	type end func(t *testing.T, r *Consumer, n *fakeNSQD)
	ends := map[string]end{
		"at Disconnect": func(t *testing.T, r *Consumer, n *fakeNSQD) { require.NoError(t, r.DisconnectFromNSQD(n.addr)) },
		"at Stop":       func(t *testing.T, r *Consumer, n *fakeNSQD) { stopConsumer(t, r, 99*time.Millisecond) },
	}
	states := map[string]func(n *fakeNSQD){
		"waiting for the next try": func(n *fakeNSQD) { n.down(); time.Sleep(time.Minute) },
		"in a dial that hangs":     func(n *fakeNSQD) { n.setReach(reachHangs); n.dropAll(); time.Sleep(900 * time.Millisecond) },
		"in a handshake":           func(n *fakeNSQD) { n.setReach(reachSilent); n.dropAll(); time.Sleep(10 * time.Second) },
	}
	for what, state := range states {
		for when, end := range ends {
			t.Run(what+", "+when, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNSQD(t)
					r := newDirectConsumer(t, n.cluster, func(cfg *Config) { cfg.DialTimeout = time.Hour })
					require.NoError(t, r.ConnectToNSQD(n.addr))
					state(n)
					tries := len(n.dialTimes())
					start := time.Now()
					end(t, r, n)
					require.Less(t, time.Since(start), 100*time.Millisecond)
					n.up()
					synctest.Wait()
					require.Len(t, n.dialTimes(), tries)
					time.Sleep(time.Hour)
					require.Len(t, n.dialTimes(), tries)
				})
			})
		}
	}
}

func TestReconnectDoesNotWaitForOldHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 4 })
		release := make(chan struct{})
		r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
			<-release
			return nil
		}), 4)
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		old := n.conn()
		n.publishN(4)
		n.cluster.waitUntil(func() bool { return n.stats().InFlight == 4 })
		synctest.Wait()
		lost := time.Now()
		n.dropAll()
		fresh := n.waitSubscribed()
		require.LessOrEqual(t, time.Since(lost), 250*time.Millisecond)
		require.NotEqual(t, old.number, fresh.number)
		close(release)
		time.Sleep(10 * time.Second)
		require.NotContains(t, fakeCommandNames(fresh.sent()), "FIN", "answers of the old connection are not sent on the new one")
		n.expire()
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 4 })
	})
}

// fakeCommandNames are the first words of command lines.
func fakeCommandNames(lines []string) (names []string) {
	for _, line := range lines {
		names = append(names, fakeEntry{Line: line}.name())
	}
	return names
}

func TestConnectByHandWhileWaitingForTheNextTry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, func(cfg *Config) {
			cfg.ReconnectInterval, cfg.MaxReconnectInterval = 5*time.Minute, time.Hour
		})
		require.NoError(t, r.ConnectToNSQD(n.addr))
		time.Sleep(2 * time.Second)
		n.down()
		synctest.Wait()
		require.Equal(t, NodeWaiting, r.Status().NSQDs[0].State)
		require.Error(t, r.ConnectToNSQD(n.addr), "it is tried at once, and the caller told")
		require.Len(t, n.dialTimes(), 2)
		n.up()
		require.NoError(t, r.ConnectToNSQD(n.addr))
		require.Same(t, ErrAlreadyConnected, r.ConnectToNSQD(n.addr))
		time.Sleep(24 * time.Hour)
		require.Len(t, n.dialTimes(), 3, "which ends the tries")
		require.Equal(t, 1, n.stats().Conns)
	})
}

func TestRetryByHandRightAfterAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.down()
		r := newDirectConsumer(t, n.cluster, nil)
		for i := range 2000 {
			require.Error(t, r.ConnectToNSQD(n.addr))
			require.Len(t, n.dialTimes(), i+1)
		}
		n.up()
		require.NoError(t, r.ConnectToNSQD(n.addr))
	})
}

func TestRetryByHandBeforeTheFailureIsDealtWith(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.down()
		r := newDirectConsumer(t, n.cluster, nil)
		// What serve does, in the order that a quick caller makes of it.
		r.mu.Lock()
		r.startLocked()
		node := r.addNodeLocked(n.addr)
		node.direct, node.serving = true, true
		r.mu.Unlock()
		c, err := r.connect(node)
		require.Error(t, err)
		again := make(chan error, 1)
		go func() { again <- r.ConnectToNSQD(n.addr) }()
		synctest.Wait()
		delay, more := r.afterConn(node, c, err)
		require.True(t, more, "somebody waits for another try")
		require.Zero(t, delay)
		_, err = r.connect(node)
		require.Equal(t, err, <-again)
	})
}

func TestStopInTheLastMomentOfAConnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		hold := make(chan struct{})
		r.SetLogger(funcLogger(func(_ int, s string) error {
			if strings.HasSuffix(s, "stopping...") { // which comes before the connects are broken off
				<-hold
			}
			return nil
		}), LogLevelInfo)
		n.at("SUB", fakeStep{delay: time.Second})
		result := make(chan error, 1)
		go func() { result <- r.ConnectToNSQD(n.addr) }()
		n.cluster.waitEntry(byLine("SUB"))
		r.Stop()
		time.Sleep(2 * time.Second) // the subscription is accepted meanwhile
		close(hold)
		require.Equal(t, errConsumerStopped, <-result)
		select {
		case <-r.StopChan:
		case <-time.After(time.Second):
			require.Fail(t, "a connection was overlooked")
		}
		require.Zero(t, n.cluster.openConns())
	})
}

func TestDisconnectBreaksOffAConnect(t *testing.T) {
	for name, reach := range map[string]fakeReach{"dial": reachHangs, "handshake": reachSilent} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				n.setReach(reach)
				r := newDirectConsumer(t, n.cluster, func(cfg *Config) { cfg.DialTimeout = 0 })
				result := make(chan error, 1)
				go func() { result <- r.ConnectToNSQD(n.addr) }()
				time.Sleep(time.Second)
				require.NoError(t, r.DisconnectFromNSQD(n.addr))
				start := time.Now()
				require.ErrorIs(t, <-result, ErrNotConnected)
				require.Less(t, time.Since(start), 100*time.Millisecond)
				n.up()
				time.Sleep(time.Hour)
				require.Len(t, n.dialTimes(), 1)
			})
		})
	}
}

func TestDisconnectClosesGracefully(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 5 })
		r.AddHandler(HandlerFunc(func(*Message) error {
			time.Sleep(10 * time.Second)
			return nil
		}))
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		ids := n.publishN(3)
		time.Sleep(time.Second)
		start := time.Now()
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		require.Equal(t, start, time.Now(), "it does not wait")
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQD(n.addr))
		require.Empty(t, r.Status().NSQDs)
		require.Zero(t, r.Stats().Connections)
		time.Sleep(15 * time.Second)
		require.True(t, n.isFinished(ids[0]), "what a handler had is finished")
		require.Equal(t, 2, n.stats().Depth, "the rest went back")
		require.Zero(t, n.stats().Conns)
		require.Equal(t, ConsumerStats{MessagesReceived: 3, MessagesFinished: 1, MessagesRequeued: 2}, *r.Stats())
		require.NoError(t, r.ConnectToNSQD(n.addr), "it may come back")
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 3 })
	})
}

func TestConnectAgainWhileTheOldConnectionCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, nil)
		r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
			time.Sleep(10 * time.Second)
			return nil
		}), 2)
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publish("x")
		time.Sleep(time.Second)
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		time.Sleep(20 * time.Second)
		require.Equal(t, 1, n.stats().Finished)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r))
		require.Equal(t, 1, n.stats().Conns)
		require.EqualValues(t, 1, r.Stats().MessagesReceived)
	})
}

func TestManyDirectAddressesRetryEachByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150")
		r := newDirectConsumer(t, cluster, nil)
		require.NoError(t, r.ConnectToNSQDs([]string{"a:4150", "b:4150", "c:4150"}))
		cluster.nsqd("b:4150").down()
		time.Sleep(5 * time.Second)
		require.Equal(t, []string{"a:4150", "c:4150"}, nsqdsConnected(r))
		cluster.nsqd("b:4150").up()
		cluster.nsqd("b:4150").waitSubscribed()
		require.Len(t, cluster.nsqd("a:4150").dialTimes(), 1)
	})
}

func TestNodeStateNames(t *testing.T) {
	for s, want := range map[NodeState]string{
		NodeWaiting: "waiting", NodeConnecting: "connecting", NodeConnected: "connected", NodeFailed: "failed", 17: "NodeState(17)",
	} {
		require.Equal(t, want, s.String())
	}
}

func TestJoinErrorsKeepsASingleOne(t *testing.T) {
	a, b := errors.New("a"), errors.New("b")
	require.NoError(t, joinErrors(nil))
	require.NoError(t, joinErrors([]error{nil, nil}))
	require.Same(t, a, joinErrors([]error{nil, a, nil}))
	both := joinErrors([]error{a, nil, b})
	require.ErrorIs(t, both, a)
	require.ErrorIs(t, both, b)
}
