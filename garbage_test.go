package nsq

import (
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/require"
)

// collected waits until the garbage collector has taken all of them but the newest keep.
func collected[T any](t *testing.T, what string, all []weak.Pointer[T], keep int) {
	t.Helper()
	left := 0
	for range 10 {
		runtime.GC()
		left = 0
		for _, p := range all {
			if p.Value() != nil {
				left++
			}
		}
		if left <= keep {
			return
		}
	}
	require.Fail(t, "what is over is kept", "%d of %d %s", left, len(all), what)
}

// What is over can be collected while the consumer lives: neither a timer nor a context nor a list holds on to it.
func TestWhatIsOverIsForgotten(t *testing.T) {
	const rounds = 20
	for name, lose := range map[string]func(t *testing.T, n *fakeNSQD, r *Consumer){
		"a reset":         func(_ *testing.T, n *fakeNSQD, _ *Consumer) { n.dropAll() },
		"an end":          func(_ *testing.T, n *fakeNSQD, _ *Consumer) { n.closeAll() },
		"a disconnect":    func(t *testing.T, n *fakeNSQD, r *Consumer) { require.NoError(t, r.DisconnectFromNSQD(n.addr)) },
		"a failed answer": func(_ *testing.T, n *fakeNSQD, _ *Consumer) { n.conn().sendError("E_INVALID") },
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				held := make(heldMessages, 10)
				r := consumeFrom(t, n, 1, held, func(cfg *Config) { cfg.MaxBackoffDuration = 4 * time.Second })
				var conns []weak.Pointer[Conn]
				var messages []weak.Pointer[Message]
				for range rounds {
					n.waitSubscribed()
					synctest.Wait()
					conns = append(conns, weak.Make(r.conns()[0]))
					n.publish("x")
					m := held.next(t)
					messages = append(messages, weak.Make(m))
					m.Touch()
					m.RequeueWithoutBackoff(time.Hour)
					synctest.Wait()
					lose(t, n, r)
					synctest.Wait()
					time.Sleep(2 * time.Second)
					if r.Stats().Connections == 0 {
						require.NoError(t, r.ConnectToNSQD(n.addr))
					}
				}
				require.Len(t, r.nodes, 1)
				require.Empty(t, r.leaving)
				collected(t, "connections", conns, 1)
				collected(t, "messages", messages, 1)
			})
		})
	}
}

// Connects that fail leave nothing behind either.
func TestFailedConnectsAreForgotten(t *testing.T) {
	for name, step := range map[string]string{"refused IDENTIFY": "IDENTIFY", "refused SUB": "SUB"} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.at(step, fakeStep{err: "E_INVALID no"})
				r := newTestConsumer(t, n.cluster, nil)
				r.AddHandler(HandlerFunc(finishAll))
				for range 100 {
					require.Error(t, r.ConnectToNSQD(n.addr))
					require.NoError(t, r.DisconnectFromNSQD(n.addr))
				}
				synctest.Wait()
				require.Empty(t, r.nodes)
				require.Empty(t, r.leaving)
				require.Zero(t, n.cluster.openConns())
				stopConsumer(t, r, idleStop)
			})
		})
	}
}

// A consumer that has stopped can be collected as a whole, with all it used.
func TestStoppedConsumersAreForgotten(t *testing.T) {
	checkNoLeaks(t)
	var consumers []weak.Pointer[Consumer]
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		for range 20 {
			r := newTestConsumer(t, n.cluster, nil)
			r.AddConcurrentHandlers(HandlerFunc(finishAll), 5)
			require.NoError(t, r.ConnectToNSQD(n.addr))
			id := n.publishN(1)[0]
			n.cluster.waitUntil(func() bool { return n.isFinished(id) })
			stopConsumer(t, r, time.Minute)
			consumers = append(consumers, weak.Make(r))
		}
		synctest.Wait()
	})
	collected(t, "consumers", consumers, 1)
}

// The connections to nsqlookupds are few while polling, and gone when the consumers have stopped.
func TestStoppedConsumersCloseTheirConnectionsToLookupds(t *testing.T) {
	checkNoLeaks(t)
	const consumers = 5
	var open, opened atomic.Int32
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		switch s {
		case http.StateNew:
			open.Add(1)
			opened.Add(1)
		case http.StateClosed:
			open.Add(-1)
		}
	}
	server.Start()
	defer server.Close()
	for range consumers {
		cfg := NewConfig()
		cfg.LookupdPollInterval, cfg.LookupdPollJitter = 10*time.Millisecond, 0
		r, err := NewConsumer("t", "c", cfg)
		require.NoError(t, err)
		r.SetLogger(nil, LogLevelInfo)
		r.AddHandler(HandlerFunc(finishAll))
		require.NoError(t, r.ConnectToNSQLookupd(server.URL))
		require.Eventually(t, func() bool { return r.Status().NSQLookupds[0].Failures >= 3 }, 10*time.Second, time.Millisecond)
		stopConsumer(t, r, 10*time.Second)
		require.Eventually(t, func() bool { return open.Load() == 0 }, 10*time.Second, time.Millisecond, "all closed while the server lives")
	}
	require.LessOrEqual(t, opened.Load(), int32(2*consumers))
}
